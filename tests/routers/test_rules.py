"""Selection rules against a float64 reference written as loops over tokens and experts."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from l2r.routers.rules import ScoredTopK, TopKSoftmax


class _Stub(nn.Module):
    """What a rule reads from a router."""

    def __init__(self, top_k: int, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.top_k = top_k
        self.held = SimpleNamespace(bias=bias)


def _reference(logits, top_k, rule, bias):
    """One token after another, one expert after another, in float64."""
    all_weights, all_indices = [], []
    for row in logits:
        if rule.score == "softmax":
            shifted = [np.exp(z - max(row)) for z in row]
            scores = [e / sum(shifted) for e in shifted]
        else:
            scores = [1 / (1 + np.exp(-z)) for z in row]
        ranking = [s + (0.0 if bias is None else bias[n]) for n, s in enumerate(scores)]
        size = len(row) // rule.groups
        quality = []
        for g in range(rule.groups):
            members = sorted(ranking[g * size : (g + 1) * size], reverse=True)
            quality.append(sum(members[: rule.group_best]))
        kept = sorted(range(rule.groups), key=lambda g: -quality[g])[: rule.kept_groups]
        allowed = [n for n in range(len(row)) if n // size in kept]
        chosen = sorted(allowed, key=lambda n: -ranking[n])[:top_k]
        weights = [scores[n] for n in chosen]
        if rule.normalize:
            weights = [w / (sum(weights) + rule.norm_eps) for w in weights]
        all_weights.append([w * rule.scale for w in weights])
        all_indices.append(chosen)
    return np.array(all_weights), np.array(all_indices)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    score=st.sampled_from(["softmax", "sigmoid"]),
    normalize=st.booleans(),
    with_bias=st.booleans(),
    groups=st.sampled_from([(1, 1, 2), (2, 1, 2), (4, 2, 1), (4, 3, 2)]),
    top_k=st.integers(1, 4),
)
def test_scored_top_k_equals_the_loop(*, seed, score, normalize, with_bias, groups, top_k):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 16, generator=generator, dtype=torch.float64) * 2
    bias = torch.randn(16, generator=generator, dtype=torch.float64) if with_bias else None
    rule = ScoredTopK(
        score=score,
        normalize=normalize,
        norm_eps=1e-6,
        scale=2.5,
        groups=groups[0],
        kept_groups=groups[1],
        group_best=groups[2],
    )
    weights, indices = rule(_Stub(top_k), logits, bias)
    expected, chosen = _reference(
        logits.numpy(), top_k, rule, None if bias is None else bias.numpy()
    )
    np.testing.assert_array_equal(indices.numpy(), chosen)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-12)


def test_a_bias_held_by_the_router_is_found_by_its_path_and_replaces_the_passed_one():
    logits = torch.zeros(3, 4)
    rule = ScoredTopK(score="sigmoid", bias="held.bias")
    router = _Stub(1, bias=torch.tensor([[0.0, 0.0, 9.0, 0.0]]))
    weights, indices = rule(router, logits, torch.tensor([9.0, 0.0, 0.0, 0.0]))
    assert indices.flatten().tolist() == [2, 2, 2]
    assert weights.flatten().tolist() == [0.5, 0.5, 0.5]  # the bias is not in the weights


def test_softmax_after_top_k_is_the_softmax_of_the_chosen_logits():
    logits = torch.tensor([[3.0, -1.0, 2.0, 0.0]], dtype=torch.float64)
    weights, indices = TopKSoftmax()(_Stub(2), logits)
    assert indices.tolist() == [[0, 2]]
    e = np.exp([3.0, 2.0])
    np.testing.assert_allclose(weights.numpy()[0], e / e.sum(), rtol=1e-12)


def test_softmax_after_top_k_takes_no_bias():
    with pytest.raises(AssertionError):
        TopKSoftmax()(_Stub(2), torch.zeros(1, 4), torch.zeros(4))
