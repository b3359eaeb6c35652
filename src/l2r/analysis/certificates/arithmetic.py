"""Arithmetic of a router: the rounding of its sums and logits, and what ranks its experts.

Unit roundoff: largest relative error of one rounding, 2^-24 in float32 and 2^-8 in bfloat16. Sums
are kept in float32 or wider, as torch keeps those of half-precision inputs too; a product of
matrices may add up in any order, so n terms are rounded n times.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from l2r.routers import Router

STEPS = 16  # roundings of what surrounds a sum: norms, tanh, exp and log, with room to spare


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """sums, logits: unit roundoff of sums, and of the dtype that holds the logits. least, largest:
    positive numbers of that dtype. probabilities: unit roundoff of the softmax that ranks experts
    instead of their logits, float32's in every family; 0 where logits rank them.
    """

    sums: float = 0.0
    logits: float = 0.0
    least: float = 0.0
    largest: float = math.inf
    probabilities: float = 0.0

    @classmethod
    def of(cls, dtype: torch.dtype, *, ranks_logits: bool) -> "Arithmetic":
        """Arithmetic of a router whose logits are rounded to a dtype."""
        info = torch.finfo(dtype)
        sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
        least = info.smallest_normal * info.eps
        softmax = 0.0 if ranks_logits else torch.finfo(torch.float32).eps / 2
        return cls(sums, info.eps / 2, least, info.max, softmax)


IDEAL = Arithmetic()  # real numbers


def dtypes_of(router: nn.Module, logits: Tensor) -> list[torch.dtype]:
    """Dtypes to which a router may have rounded its logits, the widest first.

    Some compute in their weights' dtype and return float32; some convert their weights before.
    """
    held = {p.dtype for p in router.parameters() if p.is_floating_point()} | {logits.dtype}
    return sorted(held, key=lambda dtype: torch.finfo(dtype).eps)


def family_of(router: nn.Module) -> Any:
    """Entry of a Hugging Face router's family; None for other modules."""
    if isinstance(router, Router):
        return None
    try:
        from l2r.hf.swap import family_of as family
    except ImportError:  # without transformers there is none
        return None
    return family(router)
