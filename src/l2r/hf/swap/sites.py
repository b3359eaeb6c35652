"""Routers of a model, by layer: where they sit, and another one in the place of each."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from transformers.utils import output_capturing

from l2r.hf.models.initialize import attach_router
from l2r.hf.swap.families import FAMILIES, FAMILY_OF_ROUTER, REFUSED
from l2r.routers import Router, RouterConfig
from l2r.routers.holder import Holder
from l2r.routers.offload import device_of, onloaded
from l2r.routers.selection_rule import Selection

SELECTIONS = ("family", "router")
_INITIALIZED = "_is_hf_initialized"  # of transformers: on what has its weights already


@dataclass(frozen=True)
class Site:
    """Place of a router: its module path, the index of its layer, and the module itself."""

    path: str
    layer: int
    router: Any

    @property
    def selection(self) -> Selection:
        """Selection in force here."""
        if isinstance(self.router, Router):
            return self.router.selection
        return FAMILY_OF_ROUTER[type(self.router).__name__].selection(self.router)

    @property
    def sizes(self) -> dict[str, int]:
        """hidden_size, num_experts and top_k of the router here."""
        if isinstance(self.router, Router):
            shape: Sequence[int] = (self.router.num_experts, self.router.hidden_size)
        else:
            shape = old_weight(self).shape
        top_k = int(self.router.top_k)
        return {"num_experts": shape[0], "hidden_size": shape[1], "top_k": top_k}


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
    """Sites of all routers in ``model``, in module order; an empty list where there are none."""
    return [
        Site(path, layer_index(path), module)
        for path, module in modules_by_path(model)
        if type(module).__name__ in FAMILY_OF_ROUTER or isinstance(module, Router)
    ]


def modules_by_path(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Paths and modules in the order of ``named_modules``, without its nested generators.

    A fifth of the time; routes are recorded and replayed in blocks that open in every step.
    """
    seen, waiting = set[nn.Module](), [("", model)]
    while waiting:
        path, module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        yield path, module
        children = [(name, part) for name, part in module._modules.items() if part is not None]
        prefix = f"{path}." if path else ""
        waiting += [(prefix + name, part) for name, part in reversed(children)]


def running_sites(model: nn.Module) -> list[Site]:
    """The sites of routers that run: besides each copy that PEFT trains it keeps an original.

    Raises ValueError as ``router_sites``.
    """
    sites = router_sites(model)
    return [site for site in sites if "original_module" not in site.path.split(".")] or sites


def select_sites(model: nn.Module, layers: Sequence[int] | None = None) -> list[Site]:
    """The sites of some layers, or all. Raises ValueError for a layer without a router."""
    sites = router_sites(model)
    if layers is None:
        return sites
    is_list = isinstance(layers, Sequence) and not isinstance(layers, str)
    if not is_list or not layers or any(type(layer) is not int for layer in layers):
        raise ValueError(f"layers must be None or a list of at least one index; got {layers!r}")
    routed = sorted({site.layer for site in sites})
    for layer in layers:
        if layer not in routed:
            allowed = ", ".join(map(str, routed))
            raise ValueError(
                f"layers must name layers of this {type(model).__name__} whose router can be "
                f"replaced ({allowed}); got {layer}"
            )
    return [site for site in sites if site.layer in layers]


def old_weight(site: Site) -> Tensor:
    """The [N, D] matrix of a family's own router."""
    weight: Tensor = attrgetter(FAMILY_OF_ROUTER[type(site.router).__name__].weight)(site.router)
    return weight


def new_router(site: Site, config: RouterConfig, selection: str = "family") -> Router:
    """Build a router with the sizes, device and selection, its bias included, of a site's own."""
    if selection not in SELECTIONS:
        raise ValueError(f"selection must be family or router; got selection={selection!r}")
    keep = selection == "family" and site.selection.family is not None
    for field in ("normalize_weights", "selection_bias") if keep else ():
        usual, value = type(config).__dataclass_fields__[field].default, getattr(config, field)
        if value != usual:
            raise ValueError(
                f"{field} is decided by the model's family; leave it {usual} "
                f"or swap with selection='router'; got {field}={value}"
            )
    with onloaded(site.router):
        device = device_of(site.router)
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
    """Put a router, new or old, at a site; it needs initial weights where the one there does."""
    parent, _, name = site.path.rpartition(".")
    block: Any = model.get_submodule(parent)
    setattr(block, name, router)
    if hasattr(site.router, _INITIALIZED):
        setattr(router, _INITIALIZED, site.router._is_hf_initialized)
    # Some families initialize ``block.gate.weight`` by name while a checkpoint loads; those whose
    # block has tensors, a selection bias, initialize these alone.
    if not [*block.parameters(recurse=False), *block.buffers(recurse=False)]:
        setattr(block, _INITIALIZED, True)


def _is_recorded(router: Router) -> bool:
    """Whether transformers' hook that records ``router_logits`` is on the module."""
    hooks = router._forward_hooks.values()
    names = ("output_capturing_hook", _record_logits.__name__)
    return any(getattr(hook, "__name__", "") in names for hook in hooks)


def _record_logits(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Collect the logits for transformers' ``output_router_logits``, as its own hook does.

    Its own hook is a closure, so a model with it cannot be pickled or sent to a process.
    """
    collected = output_capturing._active_collector.get()
    if collected is not None and "router_logits" in collected:
        collected["router_logits"].append(output[0])


def _carry(old: nn.Module, router: Router, name: str) -> None:
    """Move a buffer, a parameter or the tensors of a module to ``router`` under the same keys."""
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


def layer_index(path: str) -> int:
    """Index of the layer that a module path names, 0 where it names none."""
    numbers = re.findall(r"\.(\d+)\.", f".{path}.")
    return int(numbers[0]) if numbers else 0


def replay_swaps(model: nn.Module, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Apply what ``swap_routers`` wrote into config.json; returns the paths of the routers."""
    paths = []
    for entry in entries:
        config = RouterConfig.from_dict(entry["router"])
        for site in select_sites(model, entry["layers"]):
            place_router(model, site, new_router(site, config, entry["selection"]))
            paths.append(site.path)
    return paths
