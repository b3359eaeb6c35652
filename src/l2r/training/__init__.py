"""Training: one loop for language and vision, with its data, recipes and evaluation.

Imports hf/ and below. Begin at loop.py; step.py is one step of it.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.training.checkpoint import load_weights as load_weights
    from l2r.training.claim import check_text as check_text
    from l2r.training.claim import claim_run as claim_run
    from l2r.training.claim import differing_fields as differing_fields
    from l2r.training.claim import has_recipe as has_recipe
    from l2r.training.claim import recipe_meaning as recipe_meaning
    from l2r.training.fit import FitReport as FitReport
    from l2r.training.fit import fit_routers as fit_routers
    from l2r.training.fit_options import FitOptions as FitOptions
    from l2r.training.fit_options import JointOptions as JointOptions
    from l2r.training.image_input import ImageInput as ImageInput
    from l2r.training.image_input import open_image_input as open_image_input
    from l2r.training.loop import train as train
    from l2r.training.monitor import progress_bar as progress_bar
    from l2r.training.objective import auxiliary_losses as auxiliary_losses
    from l2r.training.objective import expert_loads as expert_loads
    from l2r.training.objective import layer_usage as layer_usage
    from l2r.training.optimizer import build_optimizer as build_optimizer
    from l2r.training.parallel import accumulate as accumulate
    from l2r.training.parallel import autocast_to as autocast_to
    from l2r.training.parallel import shard as shard
    from l2r.training.parallel import transformer_blocks as transformer_blocks
    from l2r.training.pixels import with_pixels as with_pixels
    from l2r.training.ranks import Ranks as Ranks
    from l2r.training.seen_text import unseen_part as unseen_part
    from l2r.training.signals import StopRequest as StopRequest
    from l2r.training.signals import stop_on_signals as stop_on_signals
    from l2r.training.task import Task as Task
    from l2r.training.task import build_task as build_task
    from l2r.training.task import task_class as task_class
    from l2r.training.upcycling import upcycle as upcycle
else:
    __getattr__, __dir__ = lazy_names(__name__)
