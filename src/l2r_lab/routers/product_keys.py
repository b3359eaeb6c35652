"""Product keys (Lample et al., arXiv 1907.05242), the router of PEER (He, arXiv 2407.04153).

Experts stand on a grid. A query has two halves, one compared with the keys of the rows and one
with those of the columns, and the logit of an expert is the sum: z_ij = q1 . k1_i + q2 . k2_j.
So N experts need about 2 sqrt(N) keys, and the best of them are found among K x K candidates.

NOTE: PEER has several such routers in one layer, each choosing other experts, and a batch
norm of the query (``query_norm="batchnorm"``). Here one router chooses all K, and the query is
normalized as the others' is. The grid has N's two nearest factors, where the papers have a square.
"""

import dataclasses
import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.functional import routing_probs
from l2r.functional.autocast import without_autocast
from l2r.functional.scoring import DEFAULTS, ScoreConstants
from l2r.kernels import dispatch
from l2r.kernels.plain import KernelWeights
from l2r.kernels.tracing import traced, transformed
from l2r.routers.base import Router, as_dtype, register_router, truncated_normal
from l2r.routers.config import RouterConfig, check
from l2r.routers.holder import BareLinear, InputNormGain
from l2r.routers.l2r import QueryNorm
from l2r.routers.norms import QueryBatchNorm
from l2r_lab.routers.product_top_k import (
    product_logsumexp,
    product_scores,
    product_scores_at,
    product_top_k,
)

_ROUNDING = 1e-6  # relative error of a weight that ``choose`` may leave


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductKeysConfig(RouterConfig):
    """rank: size of the query, both halves together.

    query_norm: rmsnorm of the router input, batchnorm of every entry of the query, or none.
    Projection and keys start so that inputs of unit variance give logits of unit variance, at any
    hidden_size and rank; ``temperature`` sets another scale.
    """

    read_with: ClassVar = {"norm_eps": {"query_norm": ("rmsnorm", "batchnorm")}}

    rank: int = 16
    query_norm: QueryNorm = "rmsnorm"
    norm_eps: float = DEFAULTS.norm_eps

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.rank >= 2 and self.rank % 2 == 0, self, "rank", "even and >= 2")
        check(self.norm_eps > 0, self, "norm_eps", "> 0")


@register_router("product_keys")
class ProductKeysRouter(Router):
    """Parameters: ``norm.weight`` [D] or ``batch_norm`` [R], ``projection.weight`` [R, D], which
    is W_q of both halves, ``row_keys`` [A, R / 2] and ``column_keys`` [B, R / 2] with A B = N.

    Raises ValueError for a number of experts that no grid has, and a rank above 2 hidden_size.
    """

    Config = ProductKeysConfig
    holders = ("norm", "projection")

    def __init__(self, config: ProductKeysConfig, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        if config.rank > 2 * self.hidden_size:
            raise InputError(
                f"rank must be <= 2 hidden_size, each half <= hidden_size; got rank={config.rank}, "
                f"hidden_size={self.hidden_size}; lower rank"
            )
        rows, columns = grid_of(self.num_experts)
        self.score = ScoreConstants("dot", norm_eps=config.norm_eps)
        self.norm = InputNormGain(self.hidden_size) if config.query_norm == "rmsnorm" else None
        self.projection = BareLinear(self.hidden_size, config.rank)
        batch_norm = config.query_norm == "batchnorm"
        self.batch_norm = QueryBatchNorm(config.rank, eps=config.norm_eps) if batch_norm else None
        self.row_keys = nn.Parameter(torch.empty(rows, config.rank // 2))
        self.column_keys = nn.Parameter(torch.empty(columns, config.rank // 2))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        truncated_normal(self.projection.weight, self.hidden_size**-0.5)
        for keys in (self.row_keys, self.column_keys):
            truncated_normal(keys, self.config.rank**-0.5)
        if self.norm is not None:
            self.norm.weight.fill_(1)
        if self.batch_norm is not None:
            self.batch_norm.reset_parameters()

    def query(self, x: Tensor) -> Tensor:
        x, dtype = self._prepare(x), self.compute_dtype(x)
        gain = None if self.norm is None else as_dtype(self.norm.weight, dtype)
        query = dispatch.routing_query(x, as_dtype(self.projection.weight, dtype), gain, self.score)
        return query if self.batch_norm is None else self.batch_norm(query)

    def raw_logits(self, x: Tensor) -> Tensor:
        return product_scores(*self._half_scores(x))

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and indices from the scores of rows and columns, without those of all experts.

        Falls back to the scores of all experts where K x K candidates are a quarter of N or more,
        for a selection other than softmax top-k, and where something sees the call or records its
        operations.
        """
        few = 4 * self.top_k**2 < self.num_experts and self.selection.fused
        if not few or self.is_watched() or traced(x) or transformed() or _in_cuda_graph(x):
            return super().choose(x)
        with without_autocast(x.device):
            weights, indices = self._inside_holders(self._choose, x)
        return as_dtype(weights, x.dtype), indices

    def _choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = (self._tempered(half) for half in self._half_scores(self._prepare(x)))
        indices = product_top_k(first, second, self.top_k)
        logits = product_scores_at(first, second, indices)
        if self.selection.normalize:
            return routing_probs(logits), indices
        wide = torch.promote_types(logits.dtype, torch.float32)  # as in routing_probs
        total = product_logsumexp(as_dtype(first, wide), as_dtype(second, wide))
        weights = torch.exp(logits - total)
        # Where scores are large, rounding of every sum counts, which a product of sums leaves out.
        rounding = torch.finfo(wide).eps * (first.abs().amax(1) + second.abs().amax(1))
        rounded = (rounding > _ROUNDING).nonzero().flatten()
        if len(rounded):
            probs = routing_probs(product_scores(first[rounded], second[rounded]))
            weights = weights.index_copy(0, rounded, probs.gather(1, indices[rounded]))
        return weights, indices

    def _logits(self, x: Tensor, parts: KernelWeights | None) -> Tensor:
        """Return the sums of tempered halves: the numbers that ``_choose`` compares, to the bit."""
        del parts
        return product_scores(*(self._tempered(half) for half in self._half_scores(x)))

    def _half_scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.query(x).chunk(2, dim=1)
        rows, columns = (as_dtype(k, first.dtype) for k in (self.row_keys, self.column_keys))
        return first @ rows.T, second @ columns.T


def _in_cuda_graph(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def grid_of(num_experts: int) -> tuple[int, int]:
    """Rows and columns, as nearly as many as divide ``num_experts``, rows not the more.

    Raises ValueError where that is one row of more than three: keys of pairs would save nothing.
    """
    rows = _rows(num_experts)
    if rows == 1 and num_experts > 3:
        allowed = f"{num_experts - 1} and {num_experts + 1}"  # even numbers
        raise InputError(
            "num_experts must be a product of two factors above 1 for product keys, or below 4; "
            f"got num_experts={num_experts}; the nearest are {allowed}"
        )
    return rows, num_experts // rows


def _rows(num_experts: int) -> int:
    return max(n for n in range(1, math.isqrt(num_experts) + 1) if num_experts % n == 0)
