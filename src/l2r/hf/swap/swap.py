"""Replace the routers of a Hugging Face MoE model by ours, keeping the family's own selection.

Only the scoring changes: how logits become weights and indices (softmax or sigmoid, groups,
selection bias, renormalization, scaling) stays the family's, as do experts, shared experts and
everything else. The new router sits where the old one sat and returns the same triple.
"""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from l2r.errors import InputError
from l2r.hf.models import L2rOlmoeConfig, L2rViTConfig, note_losses, save_refusal
from l2r.hf.models.opening import NeedsPackage, NeedsPackageAndCode, drop_model_code
from l2r.hf.swap.sites import Site, find_sites, new_router, place_router, router_sites, select_sites
from l2r.hf.swap.swapped_classes import mark, unmark
from l2r.routers import Router, RouterConfig
from l2r.routers.defaults import preferred_router

M = TypeVar("M", bound=nn.Module)
# Routers that a swap drew, the ones they replaced, for ``fit_routers``, and the changes of their
# tensors by then; gone with the model.
_REPLACED: WeakKeyDictionary[nn.Module, tuple[Any, int]] = WeakKeyDictionary()


UNTRAINED_WARNING = (
    "the new routers are untrained: fit them to the old ones (l2r.fit_routers, l2r swap --fit) or "
    "train the model"
)


class UntrainedRoutersWarning(UserWarning):
    """A swap drew new routers that nothing has trained yet."""


def swap_routers(
    model: M,
    config: RouterConfig | None = None,
    *,
    layers: Sequence[int] | None = None,
    selection: str = "family",
) -> M:
    """Replace the routers of ``model`` in place by fresh ones built from ``config``.

    ``config`` None takes ``L2RConfig.for_experts`` at the model's sizes, or ``L2RConfig()`` for an
    image classifier. A model whose routers are already ours can be swapped again.
    ``layers`` are indices of decoder layers; None means every layer that has a router.
    ``selection="family"`` keeps the family's own, including its selection bias with the values
    it has; "router" lets the new router select as it does in our own models.
    The new parameters are float32 whatever the model's dtype, and are drawn from a random
    stream of their own. ``save_pretrained`` then writes the description into config.json, and
    ``l2r.load_pretrained`` reads it back.

    Warns (UntrainedRoutersWarning) that the new routers are untrained: fit them to the old ones
    with ``l2r.fit_routers``, or train the model. Warns too where ``save_pretrained`` and
    ``push_to_hub`` refuse the model, since they would lose what its folder holds: packed
    weights, tensors that transformers leaves aside, parts of a wrapper, an adapter.

    Raises ValueError, before anything changes, for a family that cannot be swapped (with the
    reason), for routers that carry adapters, for layers without a router, for a model without a
    configuration, for an unknown ``selection``, and for ``config.normalize_weights`` or
    ``config.selection_bias`` where the family decides about it.
    """
    replace_routers(model, config, layers=layers, selection=selection)
    warnings.warn(UNTRAINED_WARNING, UntrainedRoutersWarning, stacklevel=2)
    lost = save_refusal(model)
    if lost:
        warnings.warn(f"save_pretrained refuses this model: {lost}", stacklevel=2)
    return model


def replace_routers(
    model: M,
    config: RouterConfig | None = None,
    *,
    layers: Sequence[int] | None = None,
    selection: str = "family",
) -> M:
    """Do what ``swap_routers`` does, without its warning."""
    if config is not None and not isinstance(config, RouterConfig):
        raise InputError(f"config must be a RouterConfig such as L2RConfig(); got {config!r}")
    if not hasattr(model, "config"):
        raise InputError(
            f"model must have a config in which the swap is recorded; got "
            f"{type(model).__name__}; pass the model inside"
        )
    sites = select_sites(model, layers)
    if config is None:
        decided = [site for site in sites if site.selection.family is not None]
        config = preferred_router(model, (decided or sites)[0], selection=selection)
    routers = [new_router(site, config, selection) for site in sites]
    for site, router in zip(sites, routers, strict=True):
        _REPLACED[router] = (_teacher(site.router), _changes(router))
        place_router(model, site, router)
    record_swap(model, config, sites, selection=selection)
    return model


def _teacher(router: nn.Module) -> nn.Module:
    """Return a router itself, or what it replaced where nothing has trained it since."""
    old, changes = _REPLACED.get(router, (router, 0))
    return old if _changes(router) == changes else router


def _changes(router: nn.Module) -> int:
    """Count the changes of a router's parameters in place, which inference mode does not count."""
    return sum(p._version for p in router.parameters() if not p.is_inference())


def unfitted_sites(model: nn.Module) -> list[tuple[Site, Router]]:
    """Sites with the router that a swap replaced there, and the one that it drew.

    Empty for a model that was loaded, copied or fitted: the old routers are in the memory of the
    process that swapped them, nowhere else.
    """
    return [
        (replace(site, router=_REPLACED[site.router][0]), site.router)
        for site in find_sites(model)
        if site.router in _REPLACED
    ]


def forget_replaced(routers: Sequence[Router]) -> None:
    """Let go of the routers that these replaced."""
    for router in routers:
        _REPLACED.pop(router, None)


def record_swap(
    model: nn.Module, config: RouterConfig, sites: Sequence[Site], *, selection: str = "family"
) -> None:
    """Write into the model's configuration which routers now sit where.

    Into a copy of it: other models may have been built from the same object.
    """
    note_losses(model)
    _take_own_config(model)
    model_config: Any = model.config
    if isinstance(model_config, NeedsPackage) and not isinstance(model_config, NeedsPackageAndCode):
        drop_model_code(model_config)  # of an export, whose code has other routers
    everywhere = len(sites) == len(router_sites(model))
    ours = isinstance(model_config, L2rOlmoeConfig | L2rViTConfig)
    if ours and everywhere and selection == "family":
        model_config.router = config.to_dict()  # says it all by itself
        if hasattr(model_config, "l2r_swap"):
            del model_config.l2r_swap
        unmark(model)
        return
    layers = sorted({site.layer for site in sites})  # PEFT keeps a router and its trained copy
    entry = {"router": config.to_dict(), "layers": layers, "selection": selection}
    earlier = getattr(model_config, "l2r_swap", None) or []
    keeps = selection == "family" and any(swap["selection"] == "router" for swap in earlier)
    if everywhere and not keeps:  # nothing is left of them
        earlier = []
    model_config.l2r_swap = [*earlier, entry]
    mark(model)


def _take_own_config(model: nn.Module) -> None:
    """Give a model and its parts a copy of their configuration, parts of it included."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        held = module.__dict__.get("config")
        if id(held) in copies:
            module.config = copies[id(held)]
