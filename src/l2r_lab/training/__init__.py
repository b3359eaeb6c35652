"""Training: one loop for language and vision, with its data, recipes and evaluation.

Begin at loop.py; step.py is one step of it.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r_lab.training.checkpoint import load_weights as load_weights
    from l2r_lab.training.claim import StopRequest as StopRequest
    from l2r_lab.training.claim import check_text as check_text
    from l2r_lab.training.claim import claim_run as claim_run
    from l2r_lab.training.claim import differing_fields as differing_fields
    from l2r_lab.training.claim import has_recipe as has_recipe
    from l2r_lab.training.claim import recipe_meaning as recipe_meaning
    from l2r_lab.training.claim import resumed as resumed
    from l2r_lab.training.claim import stop_on_signals as stop_on_signals
    from l2r_lab.training.loop import train as train
    from l2r_lab.training.monitor import progress_bar as progress_bar
    from l2r_lab.training.objective import auxiliary_losses as auxiliary_losses
    from l2r_lab.training.objective import expert_loads as expert_loads
    from l2r_lab.training.objective import layer_usage as layer_usage
    from l2r_lab.training.optimizer import build_optimizer as build_optimizer
    from l2r_lab.training.parallel import accumulate as accumulate
    from l2r_lab.training.parallel import autocast_to as autocast_to
    from l2r_lab.training.parallel import shard as shard
    from l2r_lab.training.parallel import transformer_blocks as transformer_blocks
    from l2r_lab.training.pixels import with_pixels as with_pixels
    from l2r_lab.training.ranks import Ranks as Ranks
    from l2r_lab.training.run_corpus import corpus_of_run as corpus_of_run
    from l2r_lab.training.run_corpus import images_of_run as images_of_run
    from l2r_lab.training.run_inputs import load_final as load_final
    from l2r_lab.training.run_inputs import open_run as open_run
    from l2r_lab.training.run_inputs import validation_subject as validation_subject
    from l2r_lab.training.task import Task as Task
    from l2r_lab.training.task import build_task as build_task
    from l2r_lab.training.task import task_class as task_class
else:
    __getattr__, __dir__ = lazy_names(__name__)
