"""The sparse feed-forward layer: a router and its experts, residual outside.

Experts have stacked weights: SwiGLU (language) or GELU (vision).

Shape letters: T tokens, D hidden size, F expert width, N experts, K experts per token.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from l2r.moe.token_dispatch import assign
from l2r.routers import Router
from l2r.routers.base import truncated_normal

Activation = Literal["swiglu", "gelu"]


class Experts(nn.Module):
    """N feed-forward experts, each token sent to K of them, none dropped.

    ``swiglu``: down(silu(gate x) * up x), parameters gate_up_proj [N, 2F, D], down_proj
    [N, D, F], named as in transformers. ``gelu``: down(gelu(up x + b) + b), parameters up_proj
    [N, F, D], down_proj [N, D, F] and, with ``bias``, up_bias [N, F] and down_bias [N, D].
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation | str = "swiglu",
        bias: bool = False,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        if activation not in ("swiglu", "gelu"):
            raise ValueError(f"activation must be swiglu or gelu; got {activation!r}")
        if bias and activation == "swiglu":
            raise ValueError("bias is for gelu experts; got bias=True with activation='swiglu'")
        self.num_experts = num_experts
        self.activation = activation
        self.init_std = init_std
        width = intermediate_size
        if activation == "swiglu":
            self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * width, hidden_size))
        else:
            self.up_proj = nn.Parameter(torch.empty(num_experts, width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, width))
        self.up_bias = nn.Parameter(torch.empty(num_experts, width)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Return truncated normal weights, zero biases."""
        for parameter in self.parameters():
            if parameter.dim() == 3:
                truncated_normal(parameter, self.init_std)
            else:
                parameter.zero_()

    def forward(
        self,
        x: Float[Tensor, "T D"],
        indices: Int[Tensor, "T K"],
        weights: Float[Tensor, "T K"],
    ) -> Float[Tensor, "T D"]:
        """Weighted sum of the chosen experts' outputs, one grouped product per matrix."""
        plan = assign(x, indices, self.num_experts)
        rows = plan.spread(x)
        if self.activation == "swiglu":
            gate, up = plan.linear(rows, self.gate_up_proj).chunk(2, dim=-1)
            hidden = nn.functional.silu(gate) * up
        else:
            hidden = plan.linear(rows, self.up_proj)
            if self.up_bias is not None:
                hidden = hidden + self.up_bias.to(hidden.dtype)[plan.expert]
            hidden = nn.functional.gelu(hidden)
        outputs = plan.linear(hidden, self.down_proj)
        if self.down_bias is not None:
            outputs = outputs + self.down_bias.to(outputs.dtype)[plan.expert]
        return plan.combine(outputs, weights)

    def extra_repr(self) -> str:
        n, d, f = self.down_proj.shape
        return f"num_experts={n}, hidden_size={d}, intermediate_size={f}, {self.activation}"


class MoELayer(nn.Module):
    """sum_i s_i E_i(x) over the chosen experts, Eq. 3 without the residual; x is [..., D]."""

    def __init__(self, router: Router, experts: Experts) -> None:
        super().__init__()
        if router.num_experts != experts.num_experts:
            raise ValueError(
                f"router and experts must agree on num_experts; "
                f"got {router.num_experts} and {experts.num_experts}"
            )
        self.router = router
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.router, Router):  # else one that some library has wrapped
            weights, indices = self.router.choose(x)
        else:
            _, weights, indices = self.router(x)
        return self.experts(x.reshape(-1, x.shape[-1]), indices, weights).view_as(x)
