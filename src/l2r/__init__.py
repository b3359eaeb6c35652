"""L2R: low-rank and Lipschitz-controlled routing for mixture-of-experts in PyTorch.

Every name below is imported on first use, so that ``import l2r`` needs neither torch nor time. It
does one thing: transformers' Auto classes learn our model types (``transformers_hook``).
"""

from typing import TYPE_CHECKING

from l2r import transformers_hook
from l2r.imports import Missing, lazy_names

if TYPE_CHECKING:
    from l2r import functional as functional
    from l2r import routers as routers
    from l2r._version import __version__ as __version__
    from l2r.errors import InputError as InputError
    from l2r.fitting import fit_routers as fit_routers
    from l2r.functional import load_balancing_loss as load_balancing_loss
    from l2r.functional import router_z_loss as router_z_loss
    from l2r.hf.checkpoints import load_pretrained as load_pretrained
    from l2r.hf.models import L2rOlmoeConfig as L2rOlmoeConfig
    from l2r.hf.models import L2rOlmoeForCausalLM as L2rOlmoeForCausalLM
    from l2r.hf.routes import Routes as Routes
    from l2r.hf.routes import pin_routes as pin_routes
    from l2r.hf.routes import record as record
    from l2r.hf.routes import replay as replay
    from l2r.hf.swap import bias_balancing as bias_balancing
    from l2r.hf.swap import shard_routers as shard_routers
    from l2r.hf.swap import swap_routers as swap_routers
    from l2r.routers import L2RConfig as L2RConfig
    from l2r.routers import LinearConfig as LinearConfig
    from l2r.routers import LinearSipsConfig as LinearSipsConfig
    from l2r.routers import Router as Router
    from l2r.routers import RouterConfig as RouterConfig
    from l2r.routers import RouterOutput as RouterOutput
    from l2r.routers import XMoEConfig as XMoEConfig
    from l2r.routers import build_router as build_router
    from l2r.routers import register_router as register_router
    from l2r.routers import router_losses as router_losses
    from l2r.routers import router_names as router_names
    from l2r.routers import step_loads as step_loads
    from l2r.routers.capture import capture as capture
else:
    __getattr__, __dir__ = lazy_names(__name__, stand_in=Missing)

transformers_hook.register()
