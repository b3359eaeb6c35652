"""Replace the routers of a Hugging Face MoE model by ours, keeping the family's own selection.

Only the scoring changes: how logits become weights and indices (softmax or sigmoid, groups,
selection bias, renormalization, scaling) stays the family's, as do experts, shared experts and
everything else. The new router sits where the old one sat and returns the same triple.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers.utils import output_capturing

from l2r.models import L2rOlmoeConfig, L2rViTConfig
from l2r.models.initialize import attach_router
from l2r.routers import Router, RouterConfig
from l2r.routers.holder import Holder
from l2r.routers.observe import onloaded
from l2r.routers.selection import Selection
from l2r.swap.families import BY_ROUTER, FAMILIES, REFUSED
from l2r.swap.model_types import mark, unmark

M = TypeVar("M", bound=nn.Module)
SELECTIONS = ("family", "router")
# Routers that a swap drew, and the ones they replaced, for ``fit_routers``; gone with the model.
_REPLACED: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


UNTRAINED = (
    "the new routers are untrained: fit them to the old ones (l2r.fit_routers, l2r swap --fit) or "
    "train the model"
)


class UntrainedRoutersWarning(UserWarning):
    """A swap drew new routers that nothing has trained yet."""


@dataclass(frozen=True)
class Site:
    """Where a router sits: its module path, the index of its layer, and the module itself."""

    path: str
    layer: int
    router: Any

    @property
    def selection(self) -> Selection:
        """Selection in force here."""
        if isinstance(self.router, Router):
            return self.router.selection
        return BY_ROUTER[type(self.router).__name__].selection(self.router)

    @property
    def sizes(self) -> dict[str, int]:
        """hidden_size, num_experts and top_k of the router here."""
        if isinstance(self.router, Router):
            shape: Sequence[int] = (self.router.num_experts, self.router.hidden_size)
        else:
            shape = old_weight(self).shape
        top_k = int(self.router.top_k)
        return {"num_experts": shape[0], "hidden_size": shape[1], "top_k": top_k}


def swap_routers(
    model: M,
    config: RouterConfig,
    *,
    layers: Sequence[int] | None = None,
    selection: str = "family",
) -> M:
    """Replace the routers of ``model`` in place by fresh ones built from ``config``.

    A model whose routers are already ours can be swapped again.
    ``layers`` are indices of decoder layers; None means every layer that has a router.
    ``selection="family"`` keeps the family's own, including its selection bias with the values
    it has; "router" lets the new router select as it does in our own models.
    The new parameters are float32 whatever the model's dtype, and are drawn from a random
    stream of their own. ``save_pretrained`` then writes the description into config.json, and
    ``l2r.load_pretrained`` reads it back.

    Warns (UntrainedRoutersWarning) that the new routers are untrained: fit them to the old ones
    with ``l2r.fit_routers``, or train the model.

    Raises ValueError, before anything changes, for a family that cannot be swapped (with the
    reason), for routers that carry adapters, for layers without a router, for a model without a
    configuration, and for ``config.normalize_weights`` where the family decides about it.
    """
    replace_routers(model, config, layers=layers, selection=selection)
    warnings.warn(UNTRAINED, UntrainedRoutersWarning, stacklevel=2)
    return model


def replace_routers(
    model: M,
    config: RouterConfig,
    *,
    layers: Sequence[int] | None = None,
    selection: str = "family",
) -> M:
    """Do what ``swap_routers`` does, without its warning."""
    if not isinstance(config, RouterConfig):
        raise ValueError(f"config must be a RouterConfig such as L2RConfig(); got {config!r}")
    if not hasattr(model, "config"):
        raise ValueError(
            f"model must have a config in which the swap is recorded; got "
            f"{type(model).__name__}; pass the model inside"
        )
    sites = select_sites(model, layers)
    for site in sites:
        router = new_router(site, config, selection)
        # a router that was never fitted has nothing to teach
        _REPLACED[router] = _REPLACED.get(site.router, site.router)
        place_router(model, site, router)
    record_swap(model, config, sites, selection=selection)
    return model


def unfitted_sites(model: nn.Module) -> list[tuple[Site, Router]]:
    """Sites with the router that a swap replaced there, and the one that it drew.

    Empty for a model that was loaded, copied or fitted: the old routers are in the memory of the
    process that swapped them, nowhere else.
    """
    return [
        (replace(site, router=_REPLACED[site.router]), site.router)
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
    """Write into the model's configuration which routers now sit where."""
    model_config: Any = model.config
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
    mark(model, replay_swaps)


def replay_swaps(model: nn.Module, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Apply what ``swap_routers`` wrote into config.json; returns the paths of the routers."""
    paths = []
    for entry in entries:
        config = RouterConfig.from_dict(entry["router"])
        for site in select_sites(model, entry["layers"]):
            place_router(model, site, new_router(site, config, entry["selection"]))
            paths.append(site.path)
    return paths


def router_sites(model: nn.Module) -> list[Site]:
    """The routers of a supported family, or ours in their place, in the order of the layers.

    Raises ValueError where there is none, with the reason for families known not to fit, and
    where PEFT has put adapters on them.
    """
    sites = find_sites(model)
    adapted = [site.path for site in sites if site.path.endswith(".base_layer")]
    if adapted:
        raise ValueError(
            f"routers carry adapters ({adapted[0].removesuffix('.base_layer')}); merge them or "
            "swap first"
        )
    if sites:
        return sites
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    reason = REFUSED.get(kind.removesuffix("_text"))
    if reason:
        raise ValueError(f"cannot swap the routers of {kind!r}: {reason}")
    raise ValueError(
        f"{kind!r} has no router of a supported family; supported: {', '.join(FAMILIES)}"
    )


def find_sites(model: nn.Module) -> list[Site]:
    """The same, or an empty list."""
    return [
        Site(path, _layer_index(path), module)
        for path, module in model.named_modules()
        if type(module).__name__ in BY_ROUTER or isinstance(module, Router)
    ]


def select_sites(model: nn.Module, layers: Sequence[int] | None = None) -> list[Site]:
    """The sites of some layers, or all. Raises ValueError for a layer without a router."""
    sites = router_sites(model)
    if layers is None:
        return sites
    is_list = isinstance(layers, Sequence) and not isinstance(layers, str)
    if not is_list or not layers or any(type(layer) is not int for layer in layers):
        raise ValueError(f"layers must be None or a list of at least one index; got {layers!r}")
    by_layer = {site.layer: site for site in sites}
    for layer in layers:
        if layer not in by_layer:
            allowed = ", ".join(map(str, by_layer))
            raise ValueError(
                f"layers must name layers of this {type(model).__name__} whose router can be "
                f"replaced ({allowed}); got {layer}"
            )
    return [by_layer[layer] for layer in sorted(set(layers))]


def old_weight(site: Site) -> Tensor:
    """The [N, D] matrix of a family's own router."""
    weight: Tensor = attrgetter(BY_ROUTER[type(site.router).__name__].weight)(site.router)
    return weight


def new_router(site: Site, config: RouterConfig, selection: str = "family") -> Router:
    """A router of ours with the sizes, device, selection and its bias of the one at a site."""
    if selection not in SELECTIONS:
        raise ValueError(f"selection must be family or router; got selection={selection!r}")
    keep = selection == "family" and site.selection.family is not None
    usual = type(config).__dataclass_fields__["normalize_weights"].default
    if keep and config.normalize_weights != usual:
        raise ValueError(
            f"normalize_weights is decided by the model's family; leave it {usual} "
            f"or swap with selection='router'; got normalize_weights={config.normalize_weights}"
        )
    with onloaded(site.router):
        device = next(site.router.parameters()).device
        router = attach_router(config, stream=site.layer, **site.sizes).to(device)
        if keep:
            router.selection = site.selection
            if router.selection.bias is not None:
                _carry(site.router, router, router.selection.bias.partition(".")[0])
    if not isinstance(site.router, Router) or _is_recorded(site.router):
        # transformers looks for the old class, so the new module brings the hook itself.
        router.register_forward_hook(_record_logits)
    return router.train(site.router.training)


def place_router(model: nn.Module, site: Site, router: nn.Module) -> None:
    """Put a router, new or old, at a site."""
    parent, _, name = site.path.rpartition(".")
    block: Any = model.get_submodule(parent)
    setattr(block, name, router)
    # Some families initialize ``block.gate.weight`` by name while a checkpoint loads.
    block._is_hf_initialized = True


def _is_recorded(router: Router) -> bool:
    """Whether transformers' hook that records ``router_logits`` is on the module."""
    hooks = router._forward_hooks.values()
    names = ("output_capturing_hook", _record_logits.__name__)
    return any(getattr(hook, "__name__", "") in names for hook in hooks)


def _record_logits(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Hand the logits to transformers' ``output_router_logits``, as its own hook does.

    That one is a closure, with which a model can be neither pickled nor sent to a process.
    """
    collected = output_capturing._active_collector.get()
    if collected is not None and "router_logits" in collected:
        collected["router_logits"].append(output[0])


def _carry(old: nn.Module, router: Router, name: str) -> None:
    """Move a buffer, a parameter or a module's own, so that they keep their keys."""
    if name in old._buffers:
        router.register_buffer(name, old._buffers[name])
    elif name in old._parameters:
        router.register_parameter(name, old._parameters[name])
    else:
        holder, part = Holder(), old.get_submodule(name)
        for key, parameter in part.named_parameters(recurse=False):
            holder.register_parameter(key, parameter)
        for key, buffer in part.named_buffers(recurse=False):
            holder.register_buffer(key, buffer)
        router.add_module(name, holder)
        router.holders = (*router.holders, name)


def _layer_index(path: str) -> int:
    numbers = re.findall(r"\.(\d+)\.", f".{path}.")
    return int(numbers[0]) if numbers else 0
