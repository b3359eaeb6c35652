"""Sigmoid router with bias balancing (DeepSeek-V3, arXiv 2412.19437, Eq. 13 to 16).

Every expert has its own sigmoid score. A bias per expert, which no gradient reaches, is added
when experts are chosen and left out of the weights; ``update_selection_bias`` moves it against
the load after a step (loss-free balancing, arXiv 2408.15664).
"""

import dataclasses
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from l2r.kernels import dispatch
from l2r.routers.base import Router, truncated_normal
from l2r.routers.config import RouterConfig, check
from l2r.routers.registry import register_router
from l2r.routers.selection_rule import Selection


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidConfig(RouterConfig):
    """scale: multiplies the weights (2.5 in DeepSeek-V3).

    init_std: of the weights, cut at 3 sigma; None gives hidden_size ** -0.5, as in ``linear``.
    """

    normalize_weights: bool = True
    selection_bias: bool = True
    scale: float = 1.0
    init_std: float | None = 0.02

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.scale > 0, self, "scale", "> 0")
        check(self.init_std is None or self.init_std > 0, self, "init_std", "None or > 0")


@register_router("sigmoid")
class SigmoidRouter(Router):
    """Parameters: ``weight`` [N, D]; buffer ``e_score_correction_bias`` [N], named as in HF."""

    Config = SigmoidConfig

    def __init__(self, config: SigmoidConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.weight = nn.Parameter(torch.empty(self.num_experts, self.hidden_size))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        truncated_normal(self.weight, self.config.init_std or self.hidden_size**-0.5)

    def raw_logits(self, x: Tensor) -> Tensor:
        return dispatch.linear_logits(x, self.weight.to(self.compute_dtype(x)))

    def own_selection(self) -> Selection:
        return Selection(
            score="sigmoid",
            normalize=self.config.normalize_weights,
            norm_eps=1e-20,
            scale=self.config.scale,
        )


@torch.no_grad()
def update_selection_bias(
    bias: Float[Tensor, " N"], load: Float[Tensor, " N"], *, speed: float = 0.001
) -> None:
    """After a step: lower the bias of experts above the mean load by ``speed``, raise the others.

    ``load`` is what each expert got, in any unit and summed over ranks (``expert_usage``);
    ``bias`` is what ``router.selection.held_bias(router)`` gives. In place.
    """
    bias += speed * torch.sign(load.mean() - load)
