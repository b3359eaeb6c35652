"""Token files and the OLMoE mixture, prepared for training.

Begin at prepare.py.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r_lab.training.data.listing import shard_source as shard_source
    from l2r_lab.training.data.olmoe_mix import ShardPlan as ShardPlan
    from l2r_lab.training.data.olmoe_mix import name_shards as name_shards
    from l2r_lab.training.data.olmoe_mix import plan_subset as plan_subset
    from l2r_lab.training.data.olmoe_mix import read_plan as read_plan
    from l2r_lab.training.data.olmoe_mix import write_plan as write_plan
    from l2r_lab.training.data.prepare import PrepareProgress as PrepareProgress
    from l2r_lab.training.data.prepare import prepare_tokens as prepare_tokens
    from l2r_lab.training.data.prepare import shard_tasks as shard_tasks
    from l2r_lab.training.data.toy import write_toy_data as write_toy_data
else:
    __getattr__, __dir__ = lazy_names(__name__)
