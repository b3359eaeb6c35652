"""The weights of a linear map inside a router, without being an nn.Linear."""

import math

import torch
from torch import nn

from l2r.routers.holder import Holder


class BareLinear(Holder):
    """Parameters ``weight`` [O, D] and, on request, ``bias`` [O], drawn as nn.Linear draws them.

    The router computes with them itself. Serving engines and quantizers replace every nn.Linear
    they find, which would take the weight away or round it; the keys are those of nn.Linear.
    """

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(D)."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.weight.shape[1])
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        return (
            f"in_features={in_features}, out_features={out_features}, bias={self.bias is not None}"
        )
