"""The sparse feed-forward layer: a router and its experts, residual outside."""

from torch import Tensor, nn

from l2r.moe.experts import Experts
from l2r.routers import Router


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
