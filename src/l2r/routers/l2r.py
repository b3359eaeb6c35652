"""L2R, the paper's router: low-rank query, bounded scores, several anchors per expert.

And its control, which scores in the hidden space itself. Both extend ``AnchorRouter``: the fields
of the score, the query norm and the anchors.
"""

import dataclasses
import math
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.functional import magnitude, rms_norm, unit
from l2r.functional.scoring import DEFAULTS, ScoreConstants, Scoring
from l2r.kernels import dispatch
from l2r.kernels.plain import KernelWeights
from l2r.routers.base import Router, register_router, truncated_normal
from l2r.routers.config import RouterConfig, check
from l2r.routers.holder import BareLinear, InputNormGain, parameters
from l2r.routers.norms import MagnitudeBatchNorm

QueryNorm = Literal["rmsnorm", "batchnorm", "none"]

_REPULSION_STEPS = 60  # of ``even_anchors``
_OWN_STRENGTH = 4.0  # added to the strength 1 of repulsion between two anchors of one expert


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnchorConfig(RouterConfig):
    """Fields of the score (paper, Eq. 8 to 11) and of the query norm.

    scoring: dot, cosine or sips. gamma, beta, p: constants of phi and psi.
    query_norm: rmsnorm of the router input (language), batchnorm of |q| (vision), or none.
    anchor_init: initial anchors drawn on the unit sphere, or ``even_anchors``.
    """

    read_with: ClassVar = {
        **{name: {"scoring": ("sips",)} for name in ("gamma", "beta", "p")},
        "eps": {"scoring": ("cosine", "sips")},
        "norm_eps": {"query_norm": ("rmsnorm", "batchnorm")},
    }

    scoring: Scoring = "sips"
    query_norm: QueryNorm = "rmsnorm"
    anchor_init: Literal["drawn", "even"] = "drawn"
    gamma: float = DEFAULTS.gamma
    beta: float = DEFAULTS.beta
    p: float = DEFAULTS.p
    norm_eps: float = DEFAULTS.norm_eps
    eps: float = DEFAULTS.eps

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.gamma > 0, self, "gamma", "> 0")
        check(0 <= self.beta <= 1, self, "beta", "between 0 and 1")
        check(self.p >= 1, self, "p", ">= 1, so that psi is not negative")
        check(self.norm_eps > 0, self, "norm_eps", "> 0")
        check(self.eps > 0, self, "eps", "> 0")


class AnchorRouter(Router):
    """Base class of routers with anchors: query norm, anchors [N, H, R], scoring."""

    anchors: nn.Parameter

    def __init__(self, config: AnchorConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        c, scale = config, 1 / config.temperature
        self.score = ScoreConstants(c.scoring, c.gamma, c.beta, c.p, c.eps, scale, c.norm_eps)
        self.norm = InputNormGain(self.hidden_size) if config.query_norm == "rmsnorm" else None
        # Dot and cosine never read |q|: a norm of it would hold parameters without a gradient.
        scales = config.query_norm == "batchnorm" and config.scoring == "sips"
        self.magnitude_norm = MagnitudeBatchNorm(eps=config.norm_eps) if scales else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Anchors on the unit sphere (paper, Section 3.4), so that psi starts at 1."""
        super().reset_parameters()
        if self.config.anchor_init == "drawn":
            self.anchors.copy_(unit(nn.init.normal_(torch.empty_like(self.anchors))))
        elif not self.anchors.is_meta:
            self.anchors.copy_(even_anchors(*self.anchors.shape))
        if self.norm is not None:
            self.norm.weight.fill_(1)
        if self.magnitude_norm is not None:
            self.magnitude_norm.reset_parameters()

    def gain(self, dtype: torch.dtype) -> Tensor | None:
        """Gain of the input's RMSNorm, or None where the query norm is another."""
        (gain,) = parameters(dtype, (self._modules.get("norm"), "weight"))
        return gain

    def raw_logits(self, x: Tensor) -> Tensor:
        query = self.query(x)
        rho_hat = None if self.magnitude_norm is None else self.magnitude_norm(magnitude(query))
        score = self.score._replace(scale=1.0)
        return dispatch.anchor_logits(query, self.anchors.to(query.dtype), score, rho_hat)


@dataclasses.dataclass(frozen=True, kw_only=True)
class L2RConfig(AnchorConfig):
    """rank: size of the query. heads: anchors per expert.

    init_std: of W_q; None gives hidden_size ** -0.5, so that queries start with unit variance
    at any width (0.022 at OLMoE's 2048, whose own 0.02 the paper does not override).
    """

    rank: int = 2
    heads: int = 16
    init_std: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.rank >= 1, self, "rank", ">= 1")
        check(self.heads >= 1, self, "heads", ">= 1")
        check(self.init_std is None or self.init_std > 0, self, "init_std", "None or > 0")

    @classmethod
    def for_experts(
        cls,
        num_experts: int | None = None,
        hidden_size: int | None = None,
        top_k: int | None = None,
    ) -> "L2RConfig":
        """Choose anchors and rank by the number of experts, from the committed studies.

        SIPS, gamma 4, weights normalized; found for language and without a z-loss. Four numbers of
        experts were tried. 16: rank 8 with 4 anchors (the best of 15 settings in ``screen``).
        64: rank 16 with 1 anchor (the best of five on two seeds of ``needed-rank``). 256: rank 8
        with 1 anchor (``rank-8-of-256``, ``transfer``; worse than a linear router after 4.1M tokens
        in ``tokens-256``). 1,024: rank 32 with 1 anchor (``experts-1024``, where rank 8 was worse
        than a linear router). No other number was tried:
        below 16 it takes the setting of 16, above 1,024 that of 1,024, and between two tried
        numbers one anchor and the larger rank of the two, so that 17 to 255 experts have rank 16
        and 257 to 1,023 rank 32. The rank is at most ``hidden_size``; with ``top_k`` 1 weights are
        not normalized. docs/evidence.md has what each setting costs against a linear router.

        Raises InputError, a ValueError, for sizes that are missing, not whole or impossible.
        """
        sizes = {"num_experts": num_experts, "hidden_size": hidden_size, "top_k": top_k}
        got = ", ".join(f"{name}={value!r}" for name, value in sizes.items())
        if num_experts is None or hidden_size is None or top_k is None:
            raise InputError(
                "num_experts, hidden_size and top_k must all be given, such as "
                f"L2RConfig.for_experts(num_experts=8, hidden_size=1024, top_k=2); got {got}"
            )
        if not all(isinstance(size, int) for size in (num_experts, hidden_size, top_k)):
            raise InputError(f"num_experts, hidden_size and top_k must be whole numbers; got {got}")
        if min(num_experts, hidden_size, top_k) < 1 or top_k > num_experts:
            raise InputError(
                f"num_experts, hidden_size and top_k must be >= 1, top_k <= num_experts; got {got}"
            )
        heads, rank = 1, 32
        if num_experts <= 16:
            heads, rank = 4, 8
        elif num_experts < 256:
            rank = 16
        elif num_experts == 256:
            rank = 8
        rank = min(rank, hidden_size)
        return cls(gamma=4.0, rank=rank, heads=heads, normalize_weights=top_k > 1)


@register_router("l2r_dot", scoring="dot")
@register_router("l2r_cosine", scoring="cosine")
@register_router("l2r_sips", scoring="sips")
class L2RRouter(AnchorRouter):
    """Parameters: ``norm.weight`` [D], ``projection.weight`` [R, D], ``anchors`` [N, H, R]."""

    Config = L2RConfig
    holders = ("norm", "projection")

    def __init__(self, config: L2RConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        if config.rank > self.hidden_size:
            raise InputError(
                f"rank must be <= hidden_size; got rank={config.rank}, "
                f"hidden_size={self.hidden_size}; lower rank"
            )
        self.heads = config.heads
        self.projection = BareLinear(self.hidden_size, config.rank)
        self.anchors = nn.Parameter(torch.empty(self.num_experts, config.heads, config.rank))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        std = self.config.init_std or self.hidden_size**-0.5
        truncated_normal(self.projection.weight, std)

    def query(self, x: Tensor) -> Tensor:
        x, dtype = self._prepare(x), self.compute_dtype(x)
        weight = self.projection.weight.to(dtype)
        return dispatch.routing_query(x, weight, self.gain(dtype), self.score)

    def kernel_weights(self, x: Tensor) -> KernelWeights | None:
        """None where a batch statistic or a learned temperature is between the steps."""
        if self.magnitude_norm is not None or self.log_temperature is not None:
            return None
        dtype = self._dtype
        if x.dtype is not dtype:
            dtype = self.compute_dtype(x)
        modules = self._modules
        projection, norm = modules["projection"], modules.get("norm")
        return parameters(dtype, (projection, "weight"), (norm, "weight"), (self, "anchors"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearSipsConfig(AnchorConfig):
    """SIPS with the identity as projection and one anchor per expert."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.scoring == "sips", self, "scoring", "sips in a linear_sips router")


@register_router("linear_sips", scoring="sips")
class LinearSipsRouter(AnchorRouter):
    """Parameters: ``norm.weight`` [D] and ``anchors`` [N, 1, D]."""

    Config = LinearSipsConfig
    holders = ("norm",)

    def __init__(self, config: LinearSipsConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        self.anchors = nn.Parameter(torch.empty(self.num_experts, 1, self.hidden_size))
        self.reset_parameters()

    def query(self, x: Tensor) -> Tensor:
        x = self._prepare(x).to(self.compute_dtype(x))
        gain = self.gain(x.dtype)
        return x if gain is None else rms_norm(x, gain, eps=self.config.norm_eps)


def even_anchors(experts: int, heads: int, rank: int) -> Float[Tensor, "N H R"]:
    """Draw unit anchors far from each other, those of one expert above all, by torch's generator.

    In two dimensions all N H angles are equally far apart after one random turn, and so are the H
    of an expert. In more, drawn anchors repel each other for a few steps. In one there are only
    two directions, which take turns.
    """
    if rank == 1:
        turns = torch.arange(experts).unsqueeze(1) + torch.arange(heads)
        return 1.0 - 2.0 * (turns % 2).unsqueeze(-1)
    if rank == 2:
        place = torch.arange(experts, dtype=torch.float64).unsqueeze(1) / (experts * heads)
        turn = place + torch.arange(heads) / heads + torch.rand((), dtype=torch.float64)
        return torch.stack([(2 * math.pi * turn).cos(), (2 * math.pi * turn).sin()], -1).float()
    points = unit(torch.randn(experts * heads, rank))
    expert = torch.arange(experts).repeat_interleave(heads)
    strength = 1 + _OWN_STRENGTH * (expert.unsqueeze(1) == expert)
    for step in range(_REPULSION_STEPS):
        # force strength / distance^2 along each difference; the largest step shrinks to nothing
        pull = strength / torch.cdist(points, points).fill_diagonal_(torch.inf).clamp_min(0.01) ** 3
        force = pull.sum(1, keepdim=True) * points - pull @ points
        force -= (force * points).sum(1, keepdim=True) * points
        size = force.norm(dim=1).max().clamp_min(1e-12)
        points = unit(points + 0.2 * (1 - step / _REPULSION_STEPS) * force / size)
    return points.view(experts, heads, rank)
