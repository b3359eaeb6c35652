"""Routers of ours in the place of a model family's own.

Imports models/ and below. Begin at swap.py; families.py lists the families.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.hf.swap.balancing import BiasBalancing as BiasBalancing
    from l2r.hf.swap.balancing import bias_balancing as bias_balancing
    from l2r.hf.swap.balancing import moves_biases as moves_biases
    from l2r.hf.swap.families import FAMILIES as FAMILIES
    from l2r.hf.swap.families import family_of as family_of
    from l2r.hf.swap.rules import Unmatched as Unmatched
    from l2r.hf.swap.sharding import shard_routers as shard_routers
    from l2r.hf.swap.sites import Site as Site
    from l2r.hf.swap.sites import find_sites as find_sites
    from l2r.hf.swap.sites import new_router as new_router
    from l2r.hf.swap.sites import observed_sites as observed_sites
    from l2r.hf.swap.sites import place_router as place_router
    from l2r.hf.swap.sites import router_sites as router_sites
    from l2r.hf.swap.sites import running_sites as running_sites
    from l2r.hf.swap.sites import select_sites as select_sites
    from l2r.hf.swap.sites import selection_biases as selection_biases
    from l2r.hf.swap.stock import as_stock_configuration as as_stock_configuration
    from l2r.hf.swap.stock import family_selection as family_selection
    from l2r.hf.swap.stock import our_architecture as our_architecture
    from l2r.hf.swap.stock import stock_architectures as stock_architectures
    from l2r.hf.swap.swap import UNTRAINED_WARNING as UNTRAINED_WARNING
    from l2r.hf.swap.swap import forget_replaced as forget_replaced
    from l2r.hf.swap.swap import record_swap as record_swap
    from l2r.hf.swap.swap import replace_routers as replace_routers
    from l2r.hf.swap.swap import swap_routers as swap_routers
    from l2r.hf.swap.swap import unfitted_sites as unfitted_sites
    from l2r.hf.swap.trainable import freeze_routers as freeze_routers
    from l2r.hf.swap.trainable import train_routers_only as train_routers_only
    from l2r.hf.swap.trainable import trainable_parameters as trainable_parameters
    from l2r.routers.defaults import preferred_router as preferred_router
    from l2r.routers.observe import layer_index as layer_index
else:
    __getattr__, __dir__ = lazy_names(__name__, "lm")
