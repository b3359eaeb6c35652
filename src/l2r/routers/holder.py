"""Modules whose parameters a router reads, while they run."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Holder(nn.Module):
    """Holds parameters of the router around it, which runs inside this module's forward.

    A fused kernel takes the tensors of several modules at once. Offload, sharding and adapters
    work by hooks that bring a module's tensors for its own forward, and for the backward of what
    it returns. A router that ran outside would find them absent, or without their adapters.
    """

    def forward(self, x: Tensor, run: Callable[[Tensor], Any]) -> Any:
        """Call ``run(x)``, what is left of the router."""
        return run(x)
