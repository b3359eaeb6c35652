"""How experts are chosen from logits where a model family has its own rule.

A Router with ``rule`` set uses it instead of its own ``select``, so the weights and indices in
its RouterOutput are those the experts really get. Shape letters: T tokens, N experts, K chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

Score = Literal["softmax", "sigmoid"]

_READINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": partial(torch.softmax, dim=-1),
    "sigmoid": torch.sigmoid,
}


@runtime_checkable
class SelectionRule(Protocol):
    """Weights [T, K] and indices [T, K] from logits [T, N].

    ``router`` gives ``top_k``, ``training`` and tensors the rule may need; ``bias`` [N] is what
    the surrounding block passes beside the hidden states, or None.
    """

    @property
    def score(self) -> Score:
        """How the family reads a logit: a share of all experts, or each on its own."""
        ...

    @property
    def bias(self) -> str | None:
        """Path inside the router of the selection bias it owns, if it owns one."""
        ...

    def __call__(
        self, router: nn.Module, logits: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class ScoredTopK:
    """Score all experts, take the k best, weigh them by their scores.

    score: softmax over experts, or a sigmoid for each. normalize: make the weights sum to 1,
    with ``norm_eps`` added to the sum. scale: multiplies the weights.
    groups, kept_groups: experts outside the ``kept_groups`` best of ``groups`` equal groups are
    not chosen; a group is as good as the sum of its ``group_best`` best experts.
    bias: path inside the router of a selection bias [N], added to the scores when experts are
    chosen and never to the weights (DeepSeek-V3).
    """

    score: Score = "softmax"
    normalize: bool = False
    norm_eps: float = 0.0
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_best: int = 2
    bias: str | None = None

    def __call__(
        self, router: nn.Module, logits: Float[Tensor, "T N"], bias: Tensor | None = None
    ) -> tuple[Float[Tensor, "T K"], Int[Tensor, "T K"]]:
        scores = _READINGS[self.score](logits)
        if self.bias is not None:
            bias = _tensor_at(router, self.bias)
        ranking = scores if bias is None else scores + bias.reshape(-1)
        indices = self._within_groups(ranking).topk(_top_k(router), dim=-1).indices
        weights = scores.gather(1, indices)
        if self.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + self.norm_eps)
        return weights * self.scale, indices

    def _within_groups(self, ranking: Tensor) -> Tensor:
        if self.kept_groups >= self.groups:
            return ranking
        grouped = ranking.view(ranking.shape[0], self.groups, -1)
        quality = grouped.topk(self.group_best, dim=-1).values.sum(dim=-1)
        kept = quality.topk(self.kept_groups, dim=-1).indices
        dropped = torch.ones_like(quality, dtype=torch.bool).scatter(-1, kept, False)
        return grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)


@dataclass(frozen=True)
class TopKSoftmax:
    """Take the k largest logits, then softmax over those k alone (gpt-oss, Granite)."""

    score: Score = "softmax"
    bias: None = None

    def __call__(
        self, router: nn.Module, logits: Float[Tensor, "T N"], bias: Tensor | None = None
    ) -> tuple[Float[Tensor, "T K"], Int[Tensor, "T K"]]:
        assert bias is None, "no family passes a bias to this rule"
        chosen, indices = logits.topk(_top_k(router), dim=-1)
        return torch.softmax(chosen, dim=-1), indices


def _top_k(router: nn.Module) -> int:
    top_k: int = router.top_k  # type: ignore[assignment]
    return top_k


def _tensor_at(module: nn.Module, path: str) -> Tensor:
    found: object = module
    for name in path.split("."):
        found = getattr(found, name)
    assert isinstance(found, Tensor), path
    return found
