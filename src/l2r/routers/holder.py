"""Modules whose parameters a router reads, while they run."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook


class Holder(nn.Module):
    """Holds parameters of the router around it, which runs inside this module's forward.

    A fused kernel takes the tensors of several modules at once. Offload, sharding and adapters
    work by hooks that bring a module's tensors for its own forward, and for the backward of what
    it returns. A router that ran outside would find them absent, or without their adapters.
    """

    def forward(self, x: Tensor, run: Callable[[Tensor], Any]) -> Any:
        """Call ``run(x)``, what is left of the router."""
        return run(x)


def takes_part(holder: nn.Module) -> bool:
    """Whether a call of a holder does more than call ``run``.

    A hook, an adapter around it, a parametrization inside it or a replaced forward does: these
    are the ways by which other libraries bring tensors.
    """
    h = holder
    return bool(
        h._forward_pre_hooks
        or h._forward_hooks
        or h._backward_hooks
        or h._backward_pre_hooks
        or h._modules
        or "forward" in h.__dict__
        or type(h).forward is not Holder.forward
    )


def hooks_of_all_modules() -> bool:
    """Whether a global hook of torch is called for every module."""
    return bool(_has_any_global_hook())  # type: ignore[no-untyped-call]


def parameter(module: nn.Module, name: str) -> Any:
    """``module.name`` for a parameter or what stands in its place, half a microsecond sooner."""
    own = module._parameters
    return own[name] if name in own else getattr(module, name)
