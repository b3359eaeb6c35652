"""The routed layers of a model, ours or of a supported family, and its fingerprint."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from l2r.errors import InputError
from l2r.hf.routes.fingerprint import Fingerprint, tokenizer_digest
from l2r.hf.swap.rules import Unmatched
from l2r.hf.swap.sites import Site, find_sites, router_sites
from l2r.routers.observe import unwrapped_model
from l2r.routers.selection_rule import Selection

# PEFT keeps a module and its trained copy, of which one runs.
_COPIES = re.compile(r"\.(original_module|modules_to_save\.[^.]+)")


@dataclass(frozen=True)
class RoutedLayer:
    """Index of a decoder layer and its router; more than one where PEFT keeps copies."""

    layer: int
    sites: tuple[Site, ...]


def routed_layers(model: nn.Module) -> list[RoutedLayer]:
    """Layers with a router, in the order of their indices.

    Raises ValueError for a model without a supported router, with the reason for families known
    not to fit, and for two routers in one layer.
    """
    by_path: dict[str, list[Site]] = {}
    for site in find_sites(model) or router_sites(model):
        by_path.setdefault(_COPIES.sub("", site.path), []).append(site)
    by_layer: dict[int, RoutedLayer] = {}
    for path, sites in by_path.items():
        index = sites[0].layer
        if index in by_layer:
            other = by_layer[index].sites[0].path
            raise InputError(
                f"a layer must have one router to be replayed; {other} and {path} are both in "
                f"layer {index}"
            )
        by_layer[index] = RoutedLayer(index, tuple(sites))
    return [by_layer[index] for index in sorted(by_layer)]


def fingerprint_of(
    model: nn.Module, tokenizer: Any = None, *, layers: Sequence[RoutedLayer] | None = None
) -> Fingerprint:
    """Fingerprint of a model's routes.

    ``layers`` are its ``routed_layers`` where the caller has them. ``tokenizer`` has
    ``get_vocab()``; None leaves it open. Raises ValueError as ``routed_layers``
    and where the routers of two layers differ in their experts or k.
    """
    layers = routed_layers(model) if layers is None else layers
    sizes = {layer.layer: layer.sites[0].sizes for layer in layers}
    kinds = {(size["num_experts"], size["top_k"]) for size in sizes.values()}
    if len(kinds) > 1:
        raise InputError(
            f"all layers must have as many experts and choose as many; got (experts, k) {kinds}"
        )
    ((num_experts, top_k),) = kinds
    config: Any = getattr(unwrapped_model(model), "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    return Fingerprint(
        num_experts=num_experts,
        top_k=top_k,
        layers=tuple(sizes),
        hidden_layers=getattr(config, "num_hidden_layers", None),
        model_type=getattr(config, "swapped_from", getattr(config, "model_type", None)),
        tokenizer=tokenizer_digest(tokenizer),
    )


def check_weighable(site: Site) -> Selection:
    """Return a site's selection. Raises ValueError if it cannot weigh experts chosen elsewhere."""
    selection = site.selection
    if isinstance(selection, Unmatched):
        raise InputError(f"cannot replay {type(site.router).__name__}: {selection.reason}")
    kind = type(selection)
    if kind.__call__ is not Selection.__call__ and kind.weigh is Selection.weigh:
        raise InputError(f"{kind.__name__} must define weigh(router, logits, indices) to replay")
    return selection
