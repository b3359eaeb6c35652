"""Sigmoid router with bias balancing (DeepSeek-V3, arXiv 2412.19437, Eq. 13 to 16).

Every expert has its own sigmoid score. A bias per expert, which no gradient reaches, is added
when experts are chosen and left out of the weights; ``update_selection_bias`` moves it against
the load after a step (loss-free balancing, arXiv 2408.15664). Neither groups nor the
sequence-wise loss.
"""

import dataclasses

import torch
from jaxtyping import Float, Real
from torch import Tensor

from l2r.routers.config import check
from l2r.routers.linear import LinearConfig, LinearRouter
from l2r.routers.registry import register_router
from l2r.routers.selection_rule import Selection


@dataclasses.dataclass(frozen=True, kw_only=True)
class SigmoidConfig(LinearConfig):
    """scale: multiplies the weights (2.5 in DeepSeek-V3)."""

    normalize_weights: bool = True
    selection_bias: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.scale > 0, self, "scale", "> 0")


@register_router("sigmoid")
class SigmoidRouter(LinearRouter):
    """Parameters: ``weight`` [N, D]; buffer ``e_score_correction_bias`` [N], named as in HF."""

    Config = SigmoidConfig

    def own_selection(self) -> Selection:
        return Selection(
            gate="sigmoid",
            normalize=self.config.normalize_weights,
            norm_eps=1e-20,
            scale=self.config.scale,
        )


@torch.no_grad()
def update_selection_bias(
    bias: Float[Tensor, " N"] | None, load: Real[Tensor, " N"], *, speed: float = 0.001
) -> None:
    """Lower the bias of experts above the mean load by ``speed``, raise that of those below.

    Call it after each step; it works in place. ``load`` is what each expert got, summed over
    micro-batches and ranks. Counts (``expert_counts``) are compared as whole numbers. Shares in
    floating point are taken as equal to their mean within 16 roundings of it. ``bias`` is one of
    ``l2r.hf.swap.selection_biases(model)``, or what ``router.selection.held_bias(router)`` gives.

    Raises ValueError where there is no bias, and for a load of another number of experts.
    """
    if bias is None:
        raise ValueError(
            "bias must be a tensor [N]; got None: this router holds no selection bias. "
            "l2r.hf.swap.selection_biases(model) has those that its block holds"
        )
    if load.shape != bias.shape:
        raise ValueError(
            f"load must have an entry for each of the {len(bias)} experts; got {list(load.shape)}"
        )
    whole = not load.is_floating_point()
    wide = load.long() if whole else load.double()
    total = wide.sum()
    above = wide * len(load) - total
    if not whole:
        rounding = 16 * torch.finfo(load.dtype).eps * total.abs()
        above = above.masked_fill(above.abs() <= rounding, 0)
    bias -= speed * torch.sign(above).to(bias)
