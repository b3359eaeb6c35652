"""Sigmoid router with bias balancing (DeepSeek-V3, arXiv 2412.19437, Eq. 13 to 16).

Every expert has its own sigmoid score. A bias per expert, which no gradient reaches, is added
when experts are chosen and left out of the weights; ``update_selection_bias`` of
l2r.routers moves it against the load after a step (loss-free balancing, arXiv 2408.15664). Neither
groups nor the sequence-wise loss.
"""

import dataclasses

from l2r.routers.base import register_router
from l2r.routers.config import check
from l2r.routers.linear import LinearConfig, LinearRouter
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
