"""Routers that keep their dtype while others change that of the whole model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from l2r.routers import Router
from l2r.routers.temporary import replaced


@contextmanager
def routers_keep_dtype(model: nn.Module) -> Iterator[None]:
    """Let ``model.to(dtype)`` inside the block move routers of ours, and not round them.

    Trainer's ``bf16_full_eval`` and ``fp16_full_eval`` call it on the model that they evaluate, and
    leave it so.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    with replaced({(router, "_apply"): partial(_apply, router) for router in routers}):
        yield


def _apply(
    router: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    def keeping(tensor: Tensor) -> Tensor:
        changed = change(tensor)
        same = changed.dtype == tensor.dtype or not tensor.is_floating_point()
        return changed if same else tensor.to(changed.device)

    applied: nn.Module = type(router)._apply(router, keeping, recurse)  # type: ignore[no-untyped-call]
    return applied
