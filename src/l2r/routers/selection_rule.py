"""Rules that choose experts from logits; every router has one ``Selection``.

Shape letters: T tokens, N experts, K experts chosen per token.
"""

import math
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.functional import best_experts, expert_weights, routing_probs
from l2r.functional.selection import softmax_weights
from l2r.kernels import dispatch

# Fields of a router's configuration that the rule of a model's family replaces.
FAMILY_FIELDS = ("normalize_weights", "selection_bias")


@dataclass(frozen=True, kw_only=True, repr=False)
class Selection:
    """Score all experts, take the k best, weigh them by their scores; softmax top-k by default.

    gate: softmax over experts, Eq. 2, or for each a sigmoid or sqrt(softplus). normalize: make
    the weights sum to 1, with ``norm_eps`` added to the sum, or a sum below ``norm_min`` raised
    to it. scale: multiplies the weights.
    groups, kept_groups: experts outside the ``kept_groups`` best of ``groups`` equal groups are
    not chosen; a group is as good as the sum of its ``group_best`` best experts. dropped: score
    of those experts when the k are chosen (A.X-K2's 0 is above that of a kept one below it).
    bias: path inside the router of a selection bias [N], added to the scores when experts are
    chosen and never to the weights (DeepSeek-V3). biased: what it is added to, the scores or the
    logits. block_bias: the surrounding block passes such a bias with each call; one at ``bias``
    takes precedence. family: model family whose rule this is, None for a router's own.

    Equals are taken from the lowest index, groups too; see ``l2r.functional.selection``.
    A subclass with another rule overrides ``__call__``, and ``weigh`` to be replayed,
    ``ranking`` for a margin loss. Raises ValueError for another gate, a number of groups or of
    kept ones below 1, and a scale that is not finite.
    """

    by_token: ClassVar[bool] = False  # whether ids of tokens choose, and not logits

    gate: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    normalize: bool = False
    norm_eps: float = 0.0
    norm_min: float = 0.0
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    dropped: float = -math.inf
    bias: str | None = None
    biased: Literal["scores", "logits"] = "scores"
    block_bias: bool = False
    family: str | None = None

    def __post_init__(self) -> None:
        if self.gate not in ("softmax", "sigmoid", "sqrtsoftplus"):
            raise InputError(f"gate must be softmax, sigmoid or sqrtsoftplus; got {self.gate!r}")
        if self.biased not in ("scores", "logits"):
            raise InputError(f"biased must be scores or logits; got {self.biased!r}")
        for name in ("groups", "kept_groups", "group_best"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be >= 1; got {getattr(self, name)}")
        if not math.isfinite(self.scale) or not 0 <= self.norm_eps < math.inf:
            raise InputError(
                f"scale must be finite and norm_eps >= 0; got {self.scale} and {self.norm_eps}"
            )
        if not 0 <= self.norm_min < math.inf:
            raise InputError(f"norm_min must be finite and >= 0; got {self.norm_min}")
        by_score = not (self.bias or self.block_bias) and self.kept_groups >= self.groups
        plain = (
            by_score
            and self.gate == "softmax"
            and (self.norm_eps, self.norm_min, self.scale) == (0, 0, 1)
        )
        # Stored, since a property would cost a decoded token a microsecond.
        object.__setattr__(self, "by_score", by_score)
        object.__setattr__(self, "fused", plain and type(self) is Selection)

    by_score = True  # the order of the scores decides, which is that of the logits
    fused = False  # softmax top-k, which the kernels do in one call, normalization included

    def __call__(
        self, router: nn.Module, logits: Float[Tensor, "T N"], bias: Tensor | None = None
    ) -> tuple[Float[Tensor, "T K"], Int[Tensor, "T K"]]:
        """Weights and indices of the chosen experts.

        ``router`` gives ``top_k``, ``training`` and the tensors a selection may need; ``bias``
        [N] is what the block passes besides the hidden states, or None.
        """
        top_k: int = router.top_k  # type: ignore[assignment]
        if self.fused:
            return dispatch.softmax_top_k(logits, top_k, normalize=self.normalize)
        scores = self._gates(logits)
        ranking = logits if self.by_score else self._ranking(router, logits, scores, bias)
        indices = dispatch.best_experts(ranking, top_k)
        return self._weights(logits, indices, scores), indices

    def weigh(
        self, router: nn.Module, logits: Float[Tensor, "T N"], indices: Int[Tensor, "T K"]
    ) -> Float[Tensor, "T K"]:
        """Weights, by the same rule, of experts that were chosen elsewhere (replayed routes).

        Scores are taken before groups are dropped, so that an expert outside of the groups that
        the router would keep has its weight, and its gradient. ``router`` gives ``training``.
        """
        del router
        return self._weights(logits, indices)

    def ranking(self, router: nn.Module, logits: Float[Tensor, "T N"]) -> Float[Tensor, "T N"]:
        """Scores whose k largest entries are the chosen experts; margins are differences of them.

        Raises ValueError for a rule that has no such scores (groups) or whose bias the block has.
        """
        kind = type(self)
        if kind.__call__ is not Selection.__call__ and kind.ranking is Selection.ranking:
            raise InputError(f"{kind.__name__} must define ranking(router, logits) for a margin")
        if self.block_bias or self.kept_groups < self.groups:
            what = "a bias of the block" if self.block_bias else "groups of experts"
            raise InputError(f"a selection by {what} has no margin between the k-th and the next")
        return self.standing(router, logits)

    def standing(
        self, router: nn.Module, logits: Float[Tensor, "T N"], bias: Tensor | None = None
    ) -> Float[Tensor, "T N"]:
        """Scores whose k largest entries are the chosen experts, those of dropped groups last."""
        if self.by_score:
            return logits
        return self._ranking(router, logits, self._gates(logits), bias)

    def scores(
        self, router: nn.Module, logits: Float[Tensor, "T N"], bias: Tensor | None = None
    ) -> Float[Tensor, "T N"]:
        """Scores with the selection bias, by which experts, and groups of them, are compared."""
        return self._biased(router, logits, self._gates(logits), bias)

    def affinities(self, logits: Float[Tensor, "T N"]) -> Float[Tensor, "T N"]:
        """Scores without a bias, in float32 or wider, divided by their sum over all experts."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = self._gates(wide)
        if self.gate == "softmax":
            return scores
        return scores / scores.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(wide.dtype).tiny)

    def _weights(self, logits: Tensor, indices: Tensor, scores: Tensor | None = None) -> Tensor:
        if self.gate == "softmax" and self.normalize and not (self.norm_eps or self.norm_min):
            return softmax_weights(logits, indices, normalize=True) * self.scale
        scores = self._gates(logits) if scores is None else scores
        summed = {"norm_eps": self.norm_eps, "norm_min": self.norm_min}
        weights = expert_weights(scores, indices, normalize=self.normalize, **summed)
        return weights * self.scale

    def held_bias(self, router: nn.Module) -> Tensor | None:
        """Bias [N] of ``router`` at the path ``bias``, or None where there is no path."""
        if self.bias is None:
            return None
        value: object = router
        for name in self.bias.split("."):
            value = getattr(value, name)
        assert isinstance(value, Tensor), self.bias
        return value.view(-1)

    def _gates(self, logits: Tensor) -> Tensor:
        if self.gate == "sqrtsoftplus":
            return nn.functional.softplus(logits).sqrt()
        return torch.sigmoid(logits) if self.gate == "sigmoid" else routing_probs(logits)

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = [
            f"{f.name}={values[f.name]!r}" for f in fields(self) if values[f.name] != f.default
        ]
        return f"{type(self).__name__}({', '.join(changed)})"

    def _biased(
        self, router: nn.Module, logits: Tensor, scores: Tensor, bias: Tensor | None
    ) -> Tensor:
        selection_bias = self.held_bias(router)
        if selection_bias is None and bias is not None and self.block_bias:
            selection_bias = bias.reshape(-1)
        scores = logits if self.biased == "logits" else scores
        return scores if selection_bias is None else scores + selection_bias

    def _ranking(
        self, router: nn.Module, logits: Tensor, scores: Tensor, bias: Tensor | None
    ) -> Tensor:
        scores = self._biased(router, logits, scores, bias)
        if self.kept_groups >= self.groups:
            return scores
        grouped = scores.masked_fill(scores.isnan(), float("-inf"))
        grouped = grouped.view(scores.shape[0], self.groups, -1)
        quality = grouped.topk(self.group_best, dim=-1).values.sum(dim=-1)
        groups = best_experts(quality, self.kept_groups)
        dropped = torch.ones_like(quality, dtype=torch.bool).scatter(-1, groups, False)
        if self.dropped == -math.inf:  # kept experts come before dropped ones
            grouped = grouped.clamp_min(torch.finfo(grouped.dtype).min)
        return grouped.masked_fill(dropped.unsqueeze(-1), self.dropped).flatten(-2)
