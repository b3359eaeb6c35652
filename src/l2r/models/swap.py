"""Replace the routers of a Hugging Face MoE model by ours, keeping the family's own rules.

Only the scoring changes: how logits become weights and indices (softmax or sigmoid, groups,
selection bias, renormalisation, scaling) stays the family's, as do experts, shared experts and
everything else. The new router sits where the old one sat and returns the same triple.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers.utils.output_capturing import install_output_capuring_hook

from l2r.models.families import BY_ROUTER, FAMILIES, REFUSED, Family
from l2r.models.initialise import attach_router
from l2r.routers import Router, RouterConfig

M = TypeVar("M", bound=nn.Module)
SELECTIONS = ("family", "router")


@dataclass(frozen=True)
class Site:
    """Where a router sits: its module path, the index of its layer, and the module itself."""

    path: str
    layer: int
    router: nn.Module


def swap_routers(
    model: M,
    config: RouterConfig,
    *,
    layers: Sequence[int] | None = None,
    selection: str = "family",
) -> M:
    """Replace the routers of ``model`` in place by fresh ones built from ``config``.

    ``layers`` are indices of decoder layers; None means every layer that has a router.
    ``selection="family"`` keeps the family's rule, including its selection bias with the values
    it has; "router" lets the new router select as it does in our own models.
    The new parameters are float32 whatever the model's dtype, and are drawn from a random
    stream of their own. ``save_pretrained`` then writes the description into config.json, and
    ``l2r.load_pretrained`` reads it back.

    Raises ValueError for a family that cannot be swapped (with the reason), for layers without
    a router, and for ``config.normalize_weights`` where the family decides about it.
    """
    if selection == "family" and config.normalize_weights:
        raise ValueError(
            "normalize_weights is decided by the model's family; leave it False "
            "or pass selection='router'; got normalize_weights=True"
        )
    chosen = _choose(model, router_sites(model), layers)
    place_routers(model, chosen, config, selection)
    entry = {
        "router": config.to_dict(),
        "layers": [site.layer for site in chosen],
        "selection": selection,
    }
    model_config: Any = model.config
    model_config.l2r_swap = [*(getattr(model_config, "l2r_swap", None) or []), entry]
    return model


def replay_swaps(model: nn.Module, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Apply what ``swap_routers`` wrote into config.json; returns the paths of the routers."""
    paths = []
    for entry in entries:
        chosen = _choose(model, router_sites(model), entry["layers"])
        config = RouterConfig.from_dict(entry["router"])
        place_routers(model, chosen, config, entry["selection"])
        paths += [site.path for site in chosen]
    return paths


def router_sites(model: nn.Module) -> list[Site]:
    """The routers of a supported family that are still its own, in the order of the layers.

    Raises ValueError where there is none, with the reason for families known not to fit.
    """
    found = [
        Site(path, _layer_index(path), module)
        for path, module in model.named_modules()
        if type(module).__name__ in BY_ROUTER
    ]
    if found:
        return found
    if any(isinstance(module, Router) for module in model.modules()):
        raise ValueError(
            f"every router of this {type(model).__name__} is already one of ours; "
            "load the original checkpoint to swap again"
        )
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    reason = REFUSED.get(kind.removesuffix("_text"))
    if reason:
        raise ValueError(f"cannot swap the routers of {kind!r}: {reason}")
    raise ValueError(
        f"{kind!r} has no router of a supported family; supported: {', '.join(FAMILIES)}"
    )


def family_of(site: Site) -> Family:
    """The family that a site's router belongs to."""
    return BY_ROUTER[type(site.router).__name__]


def family_rule(site: Site) -> Any:
    """Selection rule of the router at a site."""
    return family_of(site).rule(site.router)


def old_weight(site: Site) -> Tensor:
    """The [N, D] matrix of the family's own router."""
    weight: Tensor = attrgetter(family_of(site).weight)(site.router)
    return weight


def new_router(site: Site, config: RouterConfig, selection: str = "family") -> Router:
    """A router of ours with the sizes, device, rule and carried parts of the one at a site."""
    old: Any = site.router
    num_experts, hidden_size = old_weight(site).shape
    router = attach_router(
        config,
        stream=site.layer,
        hidden_size=hidden_size,
        num_experts=num_experts,
        top_k=int(old.top_k),
    ).to(old_weight(site).device)
    if selection == "family":
        router.rule = family_rule(site)
        for name in family_of(site).carried:
            _carry(old, router, name)
    return router.train(old.training)


def place_routers(
    model: nn.Module, sites: Sequence[Site], config: RouterConfig, selection: str
) -> None:
    """Put a new router at every site, recorded as transformers records ``router_logits``."""
    if selection not in SELECTIONS:
        raise ValueError(f"selection must be family or router; got selection={selection!r}")
    for site in sites:
        router = new_router(site, config, selection)
        # transformers looks for the old class, so the new module brings the hook itself.
        install_output_capuring_hook(router, "router_logits", 0)
        parent, _, name = site.path.rpartition(".")
        block: Any = model.get_submodule(parent)
        setattr(block, name, router)
        # Some families initialise ``block.gate.weight`` by name while a checkpoint loads.
        block._is_hf_initialized = True


def _carry(old: nn.Module, router: Router, name: str) -> None:
    """Move a buffer, a parameter or a module, so that it keeps its key in the state dict."""
    if name in old._buffers:
        router.register_buffer(name, old._buffers[name])
    elif name in old._parameters:
        router.register_parameter(name, old._parameters[name])
    else:
        router.add_module(name, old.get_submodule(name))


def _choose(model: nn.Module, sites: list[Site], layers: Sequence[int] | None) -> list[Site]:
    if layers is None:
        return sites
    by_layer = {site.layer: site for site in sites}
    for layer in layers:
        if layer not in by_layer:
            allowed = ", ".join(map(str, by_layer))
            raise ValueError(
                f"layers must name layers of this {type(model).__name__} whose router can be "
                f"replaced ({allowed}); got {layer}"
            )
    return [by_layer[layer] for layer in sorted(set(layers))]


def _layer_index(path: str) -> int:
    numbers = re.findall(r"\.(\d+)\.", f".{path}.")
    return int(numbers[0]) if numbers else 0
