"""Metrics equal independent references written with loops in numpy float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from l2r.analysis.diagnostics import metrics
from l2r.analysis.diagnostics import streaming_sums as sums


def _routing(tokens=60, experts=7, top_k=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator)
    weights, indices = logits.softmax(-1).topk(top_k, dim=-1)
    return logits, weights, indices


def _told(indices, domains, num_experts, num_domains, rows=None):
    """What experts tell of domains; without ``rows`` each token is a row of its own."""
    rows = torch.arange(len(domains)) if rows is None else rows
    joint = sums.domain_sums(indices, domains, rows, num_experts, num_domains)
    return metrics.domain_information_from_sums(joint)


ADVERSARIAL = {
    "ties": torch.zeros(5, 4),
    "one winner": torch.tensor([[1e4, -1e4, 0.0]] * 3),
    "huge offset": torch.tensor([[1e6, 1e6 + 0.25, 0.0]]),
    "tiny gap": torch.tensor([[0.2, 0.0, -1.0], [0.19999, 0.0, -1.0]], dtype=torch.float64),
    "two experts": torch.randn(9, 2, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("name", [*ADVERSARIAL, "random"])
def test_margins_equal_a_loop(name):
    logits = ADVERSARIAL.get(name, _routing()[0])
    gaps, free = [], []
    for row in logits.double().numpy():
        first, second = sorted(row)[::-1][:2]
        spread = math.sqrt(sum((v - sum(row) / len(row)) ** 2 for v in row) / len(row))
        gaps.append(first - second)
        free.append((first - second) / spread if spread > 0 else 0.0)
    got = metrics.margin_metrics(logits, threshold=0.2)
    assert got["mean_margin"] == pytest.approx(np.mean(gaps), rel=1e-12)
    assert got["low_margin_rate"] == np.mean([gap < 0.2 for gap in gaps])
    assert got["scale_free_margin"] == pytest.approx(np.mean(free), rel=1e-12)
    assert got["logit_spread"] == pytest.approx(
        logits.double().numpy().std(axis=1).mean(), rel=1e-12
    )


def test_scale_free_margin_ignores_the_scale_of_the_logits_and_the_raw_margin_does_not():
    logits = _routing()[0].double()
    small, large = metrics.margin_metrics(logits), metrics.margin_metrics(37 * logits)
    assert large["scale_free_margin"] == pytest.approx(small["scale_free_margin"], rel=1e-12)
    assert large["mean_margin"] == pytest.approx(37 * small["mean_margin"], rel=1e-12)


def test_a_margin_needs_two_experts_and_a_token():
    with pytest.raises(ValueError, match="num_experts >= 2; got 1"):
        metrics.margin_metrics(torch.zeros(3, 1))
    with pytest.raises(ValueError, match="at least 1 token"):
        metrics.margin_metrics(torch.zeros(0, 3))


def test_usage_and_load_equal_a_loop():
    _, weights, indices = _routing()
    experts, tokens = 9, len(indices)  # two experts are never chosen
    top1, topk, importance = np.zeros(experts), np.zeros(experts), np.zeros(experts)
    for row, weight in zip(indices.tolist(), weights.double().tolist(), strict=True):
        top1[row[int(np.argmax(weight))]] += 1 / tokens
        for expert, value in zip(row, weight, strict=True):
            topk[expert] += 1 / tokens
            importance[expert] += value / tokens
    used = metrics.usage_from_sums(sums.usage_sums(indices, weights, experts))
    for got, expected in zip(used, (top1, topk, importance), strict=True):
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)

    load = metrics.load_from_sums(sums.usage_sums(indices, weights, experts))
    share = topk / topk.sum()
    entropy = -sum(s * math.log(s) for s in share if s > 0) / math.log(experts)
    assert load["entropy"] == pytest.approx(entropy, rel=1e-12)
    assert load["cv"] == pytest.approx(topk.std() / topk.mean(), rel=1e-12)
    assert load["max_over_mean"] == pytest.approx(topk.max() / topk.mean(), rel=1e-12)
    assert load["min_over_mean"] == 0
    assert load["dead_experts"] == 2
    assert load["first_experts"] == np.count_nonzero(top1)
    assert load["weight_sum"] == pytest.approx(importance.sum(), rel=1e-12)
    assert load["importance_cv"] == pytest.approx(importance.std() / importance.mean(), rel=1e-12)


def test_first_choice_follows_the_weights_where_the_k_are_not_sorted():
    indices = torch.tensor([[2, 0]])
    used = metrics.usage_from_sums(sums.usage_sums(indices, torch.tensor([[0.1, 0.7]]), 3))
    assert used.top1.tolist() == [1, 0, 0]


def test_load_of_balance_and_of_collapse():
    turns, weights = torch.arange(12).view(-1, 1) % 4, torch.ones(12, 1)
    balanced = metrics.load_from_sums(sums.usage_sums(turns, weights, 4))
    assert balanced["entropy"] == pytest.approx(1)
    assert balanced["cv"] == 0
    assert balanced["max_over_mean"] == 1 and balanced["maxvio"] == 0
    collapsed = metrics.load_from_sums(sums.usage_sums(0 * turns, weights, 4))
    assert collapsed["entropy"] == 0
    assert collapsed["max_over_mean"] == 4 and collapsed["maxvio"] == 3
    assert collapsed["dead_experts"] == 3 and collapsed["first_experts"] == 1


def _cosine_variance_by_pairs(vectors):
    values = []
    for a, b in itertools.combinations(vectors, 2):
        size = np.linalg.norm(a) * np.linalg.norm(b)
        values.append(a @ b / size if size > 0 else 0.0)
    return np.var(values)


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(2, 40),
    size=st.integers(1, 12),
    shift=st.sampled_from([0.0, 3.0]),
    seed=st.integers(0, 10**6),
)
def test_cosine_variance_equals_all_pairs(tokens, size, shift, seed):
    vectors = np.random.default_rng(seed).normal(size=(tokens, size)) + shift
    vectors[0] *= 1e-3
    got = metrics.pairwise_cosine_variance(torch.from_numpy(vectors))
    assert got == pytest.approx(_cosine_variance_by_pairs(vectors), abs=1e-12)


def test_cosine_variance_with_zero_and_identical_vectors_equals_all_pairs():
    zeros = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [-2.0, 0.0]])
    got = metrics.pairwise_cosine_variance(torch.from_numpy(zeros))
    assert got == pytest.approx(_cosine_variance_by_pairs(zeros), abs=1e-14)
    assert metrics.pairwise_cosine_variance(torch.ones(50, 8)) == pytest.approx(0, abs=1e-14)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        metrics.pairwise_cosine_variance(torch.ones(1, 8))


@pytest.mark.parametrize("size", [2, 16, 256])
def test_isotropic_queries_give_one_over_their_size(size):
    vectors = torch.randn(20_000, size, generator=torch.Generator().manual_seed(0))
    assert metrics.pairwise_cosine_variance(vectors) == pytest.approx(1 / size, rel=0.02)


def test_domain_information_equals_a_loop_and_knows_its_ends():
    generator = torch.Generator().manual_seed(1)
    _, _, indices = _routing(tokens=200)
    domains = torch.randint(0, 3, (200,), generator=generator)
    joint = np.zeros((3, 7))
    for row, domain in zip(indices.tolist(), domains.tolist(), strict=True):
        for expert in row:
            joint[domain, expert] += 1 / (200 * 3)
    bits = sum(
        joint[g, n] * math.log2(joint[g, n] / (joint[g].sum() * joint[:, n].sum()))
        for g in range(3)
        for n in range(7)
        if joint[g, n] > 0
    )
    prior = -sum(p * math.log2(p) for p in joint.sum(1))
    got = _told(indices, domains, 7, 3)
    assert got["mutual_information"] == pytest.approx(bits, rel=1e-9)
    assert got["normalized"] == pytest.approx(bits / prior, rel=1e-9)
    assert got["by_chance_low"] <= got["by_chance"] <= got["by_chance_high"]

    told = _told(domains[:, None], domains, 3, 3)
    assert told["normalized"] == pytest.approx(1)
    alone = _told(indices, torch.zeros_like(domains), 7, 1)
    assert alone["normalized"] == 0


def _rows_that_ignore_domains(generator, *, rows=124, length=40, experts=8, k=2, domains=4):
    """Routing in which a row keeps to its own few experts and its domain decides nothing."""
    favor = 3 * torch.randn(rows, 1, experts, generator=generator)
    noise = torch.randn(rows, length, experts, generator=generator)
    indices = (favor + noise).topk(k, dim=-1).indices.view(-1, k)
    row = torch.arange(rows).repeat_interleave(length)
    domain = torch.randperm(rows, generator=generator)[row] % domains
    return indices, domain, row


@pytest.mark.slow("a simulation")
def test_chance_level_counts_rows_and_not_tokens():
    """Experts that ignore domains stay inside the interval of chance, 95 of 100 times."""
    generator = torch.Generator().manual_seed(2)
    inside, observed, chance = 0, [], []
    for _ in range(50):
        indices, domain, row = _rows_that_ignore_domains(generator)
        got = _told(indices, domain, 8, 4, rows=row)
        inside += got["by_chance_low"] <= got["mutual_information"] <= got["by_chance_high"]
        observed.append(got["mutual_information"])
        chance.append(got["by_chance"])
    assert inside >= 50 * 0.95 - 4 * (50 * 0.95 * 0.05) ** 0.5
    error = 4 * np.std(observed) / 50**0.5  # four standard errors
    assert np.mean(chance) == pytest.approx(np.mean(observed), abs=error)
    independent = (8 - 1) * (4 - 1) / (2 * len(indices) * 2 * math.log(2))
    assert np.mean(observed) > 5 * independent


def test_domains_that_choose_experts_stand_out_of_chance():
    generator = torch.Generator().manual_seed(3)
    indices, domain, row = _rows_that_ignore_domains(generator)
    indices[:, 0] = domain
    got = _told(indices, domain, 8, 4, rows=row)
    assert got["mutual_information"] > 2 * got["by_chance_high"]


def test_anchor_use_and_metrics_equal_a_loop():
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(50, 4, 3, generator=generator)
    indices = torch.rand(50, 4, generator=generator).topk(2, dim=-1).indices
    anchors = torch.randn(4, 3, 2, generator=generator)
    wins = np.zeros((4, 3))
    for token, row in enumerate(indices.tolist()):
        for expert in row:
            wins[expert, int(scores[token, expert].argmax())] += 1
    got = sums.anchor_sums(scores, indices)["anchor_wins"]
    np.testing.assert_array_equal(got.numpy(), wins)

    shares = [row / row.sum() for row in wins]
    entropies = [-sum(s * math.log(s) for s in row if s > 0) for row in shares]
    nearest = []
    for expert in anchors.double().numpy():
        for a in range(3):
            others = [
                expert[a] @ expert[b] / np.linalg.norm(expert[a]) / np.linalg.norm(expert[b])
                for b in range(3)
                if b != a
            ]
            nearest.append(max(others))
    use = metrics.anchor_metrics(got, anchors)
    assert use["head_entropy"] == pytest.approx(np.mean(entropies) / math.log(3))
    assert use["effective_heads"] == pytest.approx(np.mean(np.exp(entropies)))
    assert use["unused_anchors"] == np.mean(wins == 0)
    assert use["redundancy"] == pytest.approx(np.mean(nearest))


def test_anchor_metrics_of_one_head_and_of_copies():
    single = metrics.anchor_metrics(torch.tensor([[4.0], [0.0]]), torch.randn(2, 1, 2))
    assert single == {
        "head_entropy": 1.0,
        "effective_heads": 1.0,
        "unused_anchors": 0.5,
        "redundancy": 0.0,
    }
    copies = torch.ones(1, 1, 2).expand(2, 5, 2)
    assert metrics.anchor_metrics(torch.ones(2, 5), copies)["redundancy"] == pytest.approx(1)


@settings(deadline=None, max_examples=20)
@given(cut=st.integers(1, 59), seed=st.integers(0, 1000))
def test_sums_of_two_batches_are_the_sums_of_both(cut, seed):
    logits, weights, indices = _routing(seed=seed)
    parts: sums.Sums = {}
    for part in (slice(0, cut), slice(cut, None)):
        batch = sums.margin_sums(logits[part], 0.2)
        del batch["tokens"]
        sums.add(batch, sums.usage_sums(indices[part], weights[part], 7))
        sums.add(parts, batch)
    whole = metrics.margin_metrics(logits)
    assert metrics.margin_from_sums(parts) == pytest.approx(whole, rel=1e-12)
    load = metrics.load_from_sums(sums.usage_sums(indices, weights, 7))
    assert metrics.load_from_sums(parts) == pytest.approx(load, rel=1e-12)

    halves: sums.Sums = {}
    sums.add(halves, sums.cosine_sums(logits[:cut]))
    sums.add(halves, sums.cosine_sums(logits[cut:]))
    variance = metrics.pairwise_cosine_variance(logits)
    assert metrics.cosine_variance_from_sums(halves) == pytest.approx(variance, rel=1e-10)
