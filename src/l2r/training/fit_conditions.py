"""What must hold before routers are fitted: gradients are on, and the new routers train."""

from collections.abc import Sequence

import torch

from l2r.errors import InputError
from l2r.hf.swap import Site
from l2r.routers import Router


def check_gradients() -> None:
    """Raise ValueError where torch records no gradients."""
    if not torch.is_grad_enabled():  # off in inference mode, too
        raise InputError(
            "routers are fitted by gradients, which are off here; call it outside of "
            "torch.no_grad() and torch.inference_mode()"
        )


def check_trainable(sites: Sequence[Site], students: Sequence[Router]) -> None:
    """Raise ValueError where gradients are off, or a new router has no parameter that trains."""
    check_gradients()
    pairs = zip(sites, students, strict=True)
    frozen = [s.layer for s, new in pairs if not any(p.requires_grad for p in new.parameters())]
    if frozen:
        raise InputError(
            f"the new routers must train to be fitted; those of layers {frozen!s:.60} are frozen: "
            "set requires_grad_(True) on them, and freeze after the fit"
        )
