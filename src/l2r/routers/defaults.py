"""Routers for models of which only sizes are known: the preset, vision's and a swap's defaults."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn

from l2r.errors import InputError
from l2r.routers.config import RouterConfig, registered
from l2r.routers.l2r import L2RConfig
from l2r.routers.selection_rule import Selection

EVIDENCE = "evidence"
KIND = "l2r_sips"  # the router that the preset is of
# BatchNorm of |q| instead of RMSNorm of the input (Section 3.3), 4 anchors (Section 4.3).
_VISION = {"query_norm": "batchnorm", "heads": 4}


def preset_router(
    values: Mapping[str, Any], *, num_experts: int, hidden_size: int, top_k: int
) -> RouterConfig:
    """Read options with ``preset: evidence``, whose router follows from a model's sizes.

    The other options replace the preset's.

    Raises ValueError for another preset, another kind and unknown options.
    """
    options = dict(values)
    preset, kind = options.pop("preset"), options.get("kind", KIND)
    if preset != EVIDENCE:
        raise InputError(f"preset must be {EVIDENCE}; got preset={preset!r}")
    if kind != KIND:
        raise InputError(
            f"preset {EVIDENCE} is of {KIND}; got kind={kind!r}; leave one of them out"
        )
    chosen = L2RConfig.for_experts(num_experts=num_experts, hidden_size=hidden_size, top_k=top_k)
    return RouterConfig.from_dict({**chosen.to_dict(), **options})


def vision_router(values: Mapping[str, Any]) -> RouterConfig:
    """RouterConfig from its dictionary form, with the vision settings where none are given.

    Raises ValueError for unknown kinds or options.
    """
    if "kind" not in values:
        return RouterConfig.from_dict(values)
    fields = {field.name for field in dataclasses.fields(registered(values["kind"]).config)}
    defaults = {name: value for name, value in _VISION.items() if name in fields}
    return RouterConfig.from_dict({**defaults, **values})


@runtime_checkable
class ReplacedRouter(Protocol):
    """A place where a swap puts a router: its sizes, and the selection rule of the family."""

    @property
    def selection(self) -> Selection: ...
    @property
    def sizes(self) -> dict[str, int]: ...


def preferred_router(
    model: nn.Module,
    site: ReplacedRouter,
    *,
    selection: str = "family",
    options: Mapping[str, Any] | None = None,
) -> RouterConfig:
    """Return configuration from options of a router section, such as ``{"rank": 8}``, at a site.

    Without options a language model gets ``preset: evidence`` (``L2RConfig.for_experts``), an
    image classifier the paper's L2R, which that setting did not beat on images. Where the family
    decides whether weights are normalized, the preset does not.
    """
    if not options and getattr(model, "main_input_name", None) == "pixel_values":
        return L2RConfig()
    options = options or {"preset": EVIDENCE}
    if "preset" not in options:
        return RouterConfig.from_dict({"kind": KIND, **options})
    if selection == "family" and site.selection.family is not None:
        options = {"normalize_weights": False, **options}
    return preset_router(options, **site.sizes)
