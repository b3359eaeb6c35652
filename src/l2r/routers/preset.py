"""The router value ``preset: evidence``: options that follow from the sizes of a model."""

from collections.abc import Mapping
from typing import Any

from l2r.errors import InputError
from l2r.routers.config import RouterConfig
from l2r.routers.l2r import L2RConfig

EVIDENCE = "evidence"
KIND = "l2r_sips"  # the router that the preset is of


def preset_router(
    values: Mapping[str, Any], *, num_experts: int, hidden_size: int, top_k: int
) -> RouterConfig:
    """Configuration of a dictionary form with ``preset``; its other options replace the preset's.

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
