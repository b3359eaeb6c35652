"""The router of a swap, from some options or none and the sizes of the one that it replaces."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from l2r.hf.swap.sites import Site
from l2r.routers import L2RConfig, RouterConfig
from l2r.routers.preset import EVIDENCE, KIND, preset_router


def preferred_router(
    model: nn.Module,
    site: Site,
    *,
    selection: str = "family",
    options: Mapping[str, Any] | None = None,
) -> RouterConfig:
    """Configuration from options of a router section, such as ``{"rank": 8}``, at a site.

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
