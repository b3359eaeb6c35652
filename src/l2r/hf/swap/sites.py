"""Routers of a model, by layer: where they sit, and another one in the place of each."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from transformers.utils import output_capturing

from l2r.errors import InputError
from l2r.hf.models.initialize import attach_router
from l2r.hf.models.layouts import matrix_shape, unpack_before_calls
from l2r.hf.swap.families import FAMILIES, REFUSED, Family, family_of, is_of_family
from l2r.hf.swap.recognition import recognize
from l2r.hf.swap.rules import Unmatched
from l2r.routers import Router, RouterConfig
from l2r.routers.capture import RouterSite
from l2r.routers.holder import Holder
from l2r.routers.observe import BLOCK_BIASES, block_bias, block_of, layer_index, reads_text
from l2r.routers.offload import device_of, onloaded
from l2r.routers.selection_rule import FAMILY_FIELDS, Selection

SELECTIONS = ("family", "router")
INITIALIZED = "_is_hf_initialized"  # of transformers: on what has its weights already


@dataclass(frozen=True)
class Site(RouterSite):
    """Place of a router of ours, or of a family's own."""

    @property
    def selection(self) -> Selection:
        """Selection in force here."""
        if isinstance(self.router, Router):
            return self.router.selection
        return self.family.selection(self.router)

    @property
    def family(self) -> Family:
        """Family of a stock router."""
        family = family_of(self.router)
        assert family is not None, self.path
        return family

    @property
    def by_token(self) -> bool:
        """Say whether token ids choose the experts here: such a router is not replaced."""
        return self.selection.by_token

    @property
    def sizes(self) -> dict[str, int]:
        """hidden_size, num_experts and top_k of the router here."""
        if isinstance(self.router, Router):
            shape: Sequence[int] = (self.router.num_experts, self.router.hidden_size)
            top_k = int(self.router.top_k)
        else:
            shape = matrix_shape(self.router, self.family.weight)
            top_k = int(attrgetter(self.family.top_k)(self.router))
        return {"num_experts": shape[0], "hidden_size": shape[1], "top_k": top_k}


def router_sites(model: nn.Module) -> list[Site]:
    """Return the routers that can be replaced, or ours in their place, in the order of the layers.

    Without those that choose by token ids. Raises ValueError where there is none, with the reason
    for families known not to fit and for routers that follow no rule of the table, and where PEFT
    has put adapters on them.
    """
    sites = _all_sites(model)
    for site in sites:
        if isinstance(site.selection, Unmatched):
            raise InputError(f"cannot swap the routers of {_kind(model)!r}: {site.family.note}")
    return [site for site in sites if not site.by_token]


def _all_sites(model: nn.Module) -> list[Site]:
    sites = find_sites(model)
    adapted = [site.path for site in sites if site.path.endswith(".base_layer")]
    if adapted:
        raise InputError(
            f"routers carry adapters ({adapted[0].removesuffix('.base_layer')}); merge them or "
            "swap first"
        )
    if sites:
        return sites
    kind, reason = _kind(model), _refusal(model)
    if reason:
        raise InputError(f"cannot swap the routers of {kind!r}: {reason}")
    sparse = any("experts" in module._modules for module in model.modules())
    known = f"supported: {', '.join(FAMILIES)}"
    dense = "it has no experts, and a swap changes routers, it makes none"
    raise InputError(f"{kind!r} has no router of a supported family; {known if sparse else dense}")


def _kind(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def _refusal(model: nn.Module) -> str | None:
    return REFUSED.get(_kind(model).removesuffix("_text"))


def find_sites(model: nn.Module) -> list[Site]:
    """Sites of all routers in ``model``, in module order; an empty list where there are none.

    Where no router is of a family of the table, those that stand beside ``experts`` are looked at:
    see recognition.py.
    """
    sites: list[Site] = []
    unknown: list[Site] = []
    blocks: dict[str, nn.Module] = {}  # that hold experts, by the path of what stands beside them
    for path, module in modules_by_path(model):
        if isinstance(module, Router) or is_of_family(module, path):
            sites.append(Site(path, layer_index(path), module))
        elif path in blocks:
            unknown.append(Site(path, layer_index(path), module))
        elif "experts" in module._modules:
            prefix = f"{path}." if path else ""
            blocks.update({f"{prefix}{name}": module for name in ("gate", "router")})
    unknown = [site for site in unknown if not _is_wrapper(site, sites)]
    if not unknown or _refusal(model) or any(not isinstance(s.router, Router) for s in sites):
        return sites
    found = _recognized(model, unknown, blocks)
    order = {path: place for place, (path, _) in enumerate(modules_by_path(model))}
    return sorted([*sites, *found], key=lambda site: order[site.path])


def _is_wrapper(site: Site, inside: Sequence[Site]) -> bool:
    """Say whether PEFT has put a module around a router."""
    around = any(other.path.startswith(f"{site.path}.") for other in inside)
    return around or type(site.router).__module__.startswith("peft.")


def _recognized(
    model: nn.Module, sites: Sequence[Site], blocks: Mapping[str, nn.Module]
) -> list[Site]:
    """Find sites of routers that are in no table and follow transformers' contract."""
    embed = getattr(model, "get_input_embeddings", lambda: None)
    try:
        embeddings = getattr(embed(), "weight", None)
    except NotImplementedError:  # of a model without
        embeddings = None
    kind = _kind(model)
    alike: dict[Any, Family | None] = {}
    return [
        site
        for site in sites
        if reads_text(site.path)
        and recognize(site.router, kind, blocks[site.path], embeddings, alike) is not None
    ]


def recognition_note(model: nn.Module) -> str:
    """Return a line on routers that are in no table and what they match; else nothing."""
    for site in find_sites(model):
        if not isinstance(site.router, Router) and site.family.note:
            return f"routers of {_kind(model)}: {site.family.note}"
    return ""


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
    """Return the sites of routers that run: PEFT keeps an original beside each trained copy.

    With those that choose by token ids. Raises ValueError as ``router_sites``.
    """
    sites = _all_sites(model)
    return [site for site in sites if "original_module" not in site.path.split(".")] or sites


def observed_sites(model: nn.Module) -> list[Site]:
    """Sites of the routers that run, for those who look: adapters around them may be there.

    Raises ValueError for a model without routers of ours or of a supported family.
    """
    unpack_before_calls(model)
    sites = find_sites(model) or router_sites(model)
    return [site for site in sites if "original_module" not in site.path.split(".")] or sites


def selection_biases(model: nn.Module) -> dict[str, Tensor]:
    """Return selection biases [N] by the paths of their routers, held by the router or its block.

    They are the model's own tensors, for ``update_selection_bias``; ``model`` has routers of ours,
    swapped ones, or those of a supported family. Empty where experts are chosen without a bias.
    Raises ValueError as ``router_sites``.
    """
    places = bias_places(model).items()
    return {path: getattr(holder, name).detach().view(-1) for path, (holder, name) in places}


def bias_places(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Find the modules that hold the biases, and their names there: FSDP2 moves tensors."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for site in running_sites(model):
        rule = site.selection
        if rule.bias is not None:
            holder, _, name = rule.bias.rpartition(".")
            found[site.path] = site.router.get_submodule(holder), name
        elif rule.block_bias and (held := block_bias(model, site.path)):
            block = block_of(model, site.path)
            name = next(name for name in BLOCK_BIASES if getattr(block, name, None) is held[0])
            found[site.path] = block, name
    return found


def select_sites(model: nn.Module, layers: Sequence[int] | None = None) -> list[Site]:
    """Return the sites of some layers, or all. Raises ValueError for a layer without a router."""
    sites = router_sites(model)
    if layers is None:
        return sites
    is_list = isinstance(layers, Sequence) and not isinstance(layers, str)
    if not is_list or not layers or any(type(layer) is not int for layer in layers):
        raise InputError(f"layers must be None or a list of at least one index; got {layers!r}")
    routed = sorted({site.layer for site in sites})
    for layer in layers:
        if layer not in routed:
            allowed = ", ".join(map(str, routed))
            raise InputError(
                f"layers must name layers of this {type(model).__name__} whose router can be "
                f"replaced ({allowed}); got {layer}"
            )
    return [site for site in sites if site.layer in layers]


def old_weight(site: Site) -> Tensor:
    """Return the [N, D] matrix of a family's own router, packed or not."""
    weight: Tensor = attrgetter(site.family.weight)(site.router)
    return weight


def new_router(site: Site, config: RouterConfig, selection: str = "family") -> Router:
    """Build a router with the sizes, device and selection, its bias included, of a site's own."""
    if selection not in SELECTIONS:
        raise InputError(f"selection must be family or router; got selection={selection!r}")
    keep = selection == "family" and site.selection.family is not None
    for field in FAMILY_FIELDS if keep else ():
        usual, value = type(config).__dataclass_fields__[field].default, getattr(config, field)
        if value != usual:
            raise InputError(
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
    ours = isinstance(site.router, Router)
    if _is_recorded(site.router) if ours else site.family.recorded:
        # transformers looks for the old class, so the new module brings the hook itself.
        router.register_forward_hook(_record_logits)
    return router.train(site.router.training)


def place_router(model: nn.Module, site: Site, router: nn.Module) -> None:
    """Put a router, new or old, at a site; it needs initial weights where the one there does."""
    parent, _, name = site.path.rpartition(".")
    block: Any = model.get_submodule(parent)
    setattr(block, name, router)
    if hasattr(site.router, INITIALIZED):
        setattr(router, INITIALIZED, site.router._is_hf_initialized)
    # Some families initialize ``block.gate.weight`` by name while a checkpoint loads; those whose
    # block has tensors, a selection bias, initialize these alone.
    if not [*block.parameters(recurse=False), *block.buffers(recurse=False)]:
        setattr(block, INITIALIZED, True)


def _is_recorded(router: Router) -> bool:
    """Say whether transformers' hook that records ``router_logits`` is on the module."""
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


_OF_A_SWAP = {"router", "layers", "selection"}


def replay_swaps(model: nn.Module, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Apply what ``swap_routers`` wrote into config.json; returns the paths of the routers.

    Raises ValueError for anything else there.
    """
    paths = []
    for entry in entries if isinstance(entries, list | tuple) else [entries]:
        if not isinstance(entry, Mapping) or not entry.keys() >= _OF_A_SWAP:
            names = ", ".join(sorted(_OF_A_SWAP))
            raise InputError(f"l2r_swap must be a list of objects with {names}; got {entry!r:.80}")
        config = RouterConfig.from_dict(entry["router"])
        for site in select_sites(model, entry["layers"]):
            place_router(model, site, new_router(site, config, entry["selection"]))
            paths.append(site.path)
    return paths
