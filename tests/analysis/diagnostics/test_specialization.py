"""Words, pairs, paths and rare words: loops on random data, and cases with known answers."""

from collections import Counter, defaultdict
from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from l2r.analysis.diagnostics import specialization as of
from l2r.analysis.diagnostics import streaming_sums as sums
from l2r.analysis.diagnostics.choice_log import Choices
from l2r.analysis.diagnostics.metrics import domain_information_from_sums

ROWS, LENGTH, EXPERTS, K = 24, 50, 6, 2


def _choices(seed=0, *, rows=ROWS, length=LENGTH, experts=EXPERTS, k=K, holes=True):
    """Random experts [R, S, K]; some places hold no token."""
    generator = np.random.default_rng(seed)
    chosen = generator.random((rows, length, experts)).argsort(axis=2)[..., :k].astype(np.int8)
    if holes:
        chosen[generator.random((rows, length)) < 0.1] = -1
    return chosen


def _words(seed=1, *, rows=ROWS, length=LENGTH, vocabulary=40):
    return np.random.default_rng(seed).integers(0, vocabulary, (rows, length)) * 7


def test_vocabulary_specialization_equals_a_loop():
    words, first = _words(), _choices()[..., 0]
    words[:, -1] = -1  # as the token after the last one
    seen = defaultdict(list)
    for word, expert in zip(words.ravel().tolist(), first.ravel().tolist(), strict=True):
        if word >= 0 and expert >= 0:
            seen[word].append(expert)
    for least in (1, 25, 30):
        largest, own = [], defaultdict(list)
        for experts in seen.values():
            if len(experts) >= least:
                main = min(range(EXPERTS), key=lambda e, all=experts: (-all.count(e), e))
                largest.append(experts.count(main) / len(experts))
                own[main].append(largest[-1])
        got = of.vocabulary_specialization(words, first, EXPERTS, least)
        assert got.mean == pytest.approx(np.mean(largest), rel=1e-12)
        expected = [np.mean(own[e]) if own[e] else np.nan for e in range(EXPERTS)]
        np.testing.assert_allclose(got.by_expert, expected, rtol=1e-12)
    assert of.vocabulary_specialization(words, first, EXPERTS, 10_000) is None


def test_an_expert_that_serves_one_word_has_specialization_one():
    words = _words(vocabulary=EXPERTS)
    alone = of.vocabulary_specialization(words, words // 7, EXPERTS)
    assert alone.mean == 1 and alone.by_expert.tolist() == [1] * EXPERTS
    assert alone.chance.high < 0.5
    mixed = np.where(words == 7, 0, _choices(3, holes=False)[..., 0] % 5 + 1)
    assert of.vocabulary_specialization(words, mixed, EXPERTS).by_expert[0] == 1


def _rows_with_a_taste(seed, columns):
    """Labels of tokens whose row has favorites, and nothing else decides."""
    generator = np.random.default_rng(seed)
    taste = generator.dirichlet(np.ones(columns), ROWS)
    return np.stack([generator.choice(columns, LENGTH, p=row) for row in taste])


def test_experts_that_ignore_words_stay_at_chance():
    """Both have favorites by row, so tokens are far from independent; 95% of 60 lie inside."""
    inside = 0
    for seed in range(60):
        words, first = _rows_with_a_taste(seed, 12), _rows_with_a_taste(seed + 1000, EXPERTS)
        got = of.vocabulary_specialization(words, first, EXPERTS)
        inside += got.chance.low <= got.mean <= got.chance.high
    assert inside >= 51  # fewer than 1 in 1,000 of binomials (60, 0.95)


def test_coactivation_equals_a_loop():
    experts = _choices(k=3)
    pairs, single = Counter(), Counter()
    for token in experts.reshape(-1, 3).tolist():
        single.update(e for e in token if e >= 0)
        pairs.update((a, b) for a, b in permutations(token, 2) if a >= 0)
    got = of.coactivation(experts, EXPERTS)
    for a in range(EXPERTS):
        for b in range(EXPERTS):
            assert got.together[a, b] == pytest.approx(pairs[a, b] / single[a], rel=1e-6)
    most = [max(pairs[a, b] / single[a] for b in range(EXPERTS)) for a in range(EXPERTS)]
    assert got.strongest == pytest.approx(np.mean(most), rel=1e-6)


def test_two_experts_that_always_fire_together_have_coactivation_one():
    one = 2 * _choices(k=1, experts=3, holes=False)
    got = of.coactivation(np.concatenate([one, one + 1], axis=2), 6)
    np.testing.assert_array_equal(got.together, np.kron(np.eye(3), [[0, 1], [1, 0]]))
    assert got.strongest == 1 and got.chance.high < 0.5


def test_independent_pairs_stay_at_chance_whatever_their_load():
    inside, generator = 0, np.random.default_rng(0)
    for _ in range(40):
        scores = generator.gumbel(size=(ROWS, LENGTH, EXPERTS)) + np.linspace(0, 2, EXPERTS)
        chosen = scores.argsort(axis=2)[..., -2:]
        traded = next(of._trades(np.eye(EXPERTS, dtype=bool)[chosen].any(axis=2)))
        independent = traded.nonzero()[2].reshape(ROWS, LENGTH, 2)
        got = of.coactivation(independent, EXPERTS)
        inside += got.chance.low <= got.strongest <= got.chance.high
    assert inside >= 33  # fewer than 1 in 1,000 of binomials (40, 0.95)


def test_trades_keep_the_load_and_the_number_of_experts():
    experts = _choices(k=3)
    chosen = np.zeros((ROWS, LENGTH, EXPERTS + 1), bool)
    np.put_along_axis(chosen, experts.astype(int), True, axis=2)
    chosen = chosen[..., :EXPERTS]  # -1 went to the last
    *_, last = of._trades(chosen)
    np.testing.assert_array_equal(last.sum(2), chosen.sum(2))
    np.testing.assert_array_equal(last.sum((0, 1)), chosen.sum((0, 1)))
    assert (last != chosen).any(axis=2).mean() > 0.5


def _record(*firsts):
    experts = tuple(first[..., None] for first in firsts)
    return Choices(EXPERTS, experts, (), None, None, 0)


def test_paths_equal_a_count():
    firsts = [_choices(seed)[..., 0] for seed in range(3)]
    flat = zip(*(f.ravel().tolist() for f in firsts), strict=True)
    counts = Counter(path for path in flat if min(path) >= 0)
    shares = np.array(list(counts.values())) / counts.total()
    got = of.paths(_record(*firsts))
    assert got.distinct == len(counts)
    assert got.entropy == pytest.approx(-(shares * np.log2(shares)).sum(), rel=1e-12)
    assert [n for _, n in got.most] == [n for _, n in counts.most_common(10)]
    assert all(counts[tuple(path)] == n for path, n in got.most)


def test_paths_through_more_layers_than_a_number_holds_are_told_apart():
    generator = np.random.default_rng(0)
    layers = [generator.integers(0, 250, (4, 25)) for _ in range(20)]  # 250^20 is above 2^63
    for layer in layers:  # two documents agree, but for one token in the last layer
        layer[1] = layer[0]
    layers[-1][1, 0] += 1
    got = of.paths(_record(*layers))
    assert got.distinct == 3 * 25 + 1
    flat = np.stack(layers, axis=-1).reshape(-1, 20)
    rows, counts = of._counted(np.stack(layers, axis=-1))
    expected = np.unique(flat, axis=0, return_counts=True)
    assert (rows == expected[0]).all() and (counts == expected[1]).all()


def test_layers_that_follow_each_other_and_layers_that_do_not():
    first = _choices(holes=False)[..., 0]
    renamed = np.random.default_rng(1).permutation(EXPERTS)[first]
    followed = of.paths(_record(first, renamed))
    assert followed.distinct == EXPERTS and followed.entropy < followed.chance.low
    told, chance = of.path_information(first, renamed)
    assert told == pytest.approx(followed.entropy, rel=1e-12) and chance.high < 0.2
    inside = 0
    for seed in range(60):
        pair = _rows_with_a_taste(seed, EXPERTS), _rows_with_a_taste(seed + 500, EXPERTS)
        told, chance = of.path_information(*pair)
        inside += chance.low <= told <= chance.high
    assert inside >= 51  # fewer than 1 in 1,000 of binomials (60, 0.95)


def test_frequency_dependence_equals_a_loop_and_knows_its_ends():
    generator = np.random.default_rng(2)
    words = np.minimum(generator.geometric(0.1, (ROWS, LENGTH)), 60)
    first, margin = _choices()[..., 0], generator.random((ROWS, LENGTH))
    real = first >= 0
    often = np.vectorize(Counter(words[real].tolist()).get)(words[real])
    got = of.frequency_dependence(words, first, margin, EXPERTS)
    assert got.margin == pytest.approx(spearmanr(often, margin[real]).statistic, rel=1e-9)
    assert got.bins[:, 0].sum() == real.sum() and np.ptp(got.bins[:, 0]) <= 1
    order, start = np.argsort(often, kind="stable"), 0
    for tokens, count, even, gap in got.bins:
        part = order[start : start + int(tokens)]
        start += int(tokens)
        share = np.bincount(first[real][part], minlength=EXPERTS) / tokens
        assert count == pytest.approx(often[part].mean())
        assert gap == pytest.approx(margin[real][part].mean())
        assert even == pytest.approx(-(share * np.log(share)).sum() / np.log(EXPERTS), rel=1e-9)
    alike = np.zeros(words.shape)
    alike[real] = often
    assert of.frequency_dependence(words, first, alike, EXPERTS).margin == pytest.approx(1)
    assert of.frequency_dependence(words, first, -alike, EXPERTS).margin == pytest.approx(-1)
    assert of.frequency_dependence(words, first, 0 * alike, EXPERTS).margin == 0


def test_one_expert_has_all_of_every_load():
    """As an even load has: 1, without a warning of 0 / 0."""
    words = np.arange(20).reshape(4, 5) % 3
    first, margin = np.zeros((4, 5), int), np.zeros((4, 5))
    found = of.frequency_dependence(words, first, margin, 1)
    assert (found.bins[:, 2] == 1).all() and found.margin == 0


def test_domain_specialization_is_the_largest_share_of_a_domain():
    generator = torch.Generator().manual_seed(0)
    indices = torch.rand(300, EXPERTS, generator=generator).topk(K, dim=1).indices
    domains = torch.arange(300) % 3
    largest = []
    for domain in range(3):
        load = Counter(indices[domains == domain].flatten().tolist())
        largest.append(max(load.values()) / load.total())
    joint = sums.domain_sums(indices, domains, torch.arange(300), EXPERTS, 3)
    got = domain_information_from_sums(joint)
    assert got["specialization"] == pytest.approx(np.mean(largest), rel=1e-12)
    ends = [got[f"specialization_by_chance{end}"] for end in ("_low", "", "_high")]
    assert ends[0] <= ends[1] <= ends[2]
    own = sums.domain_sums(domains[:, None], domains, torch.arange(300), EXPERTS, 3)
    told = domain_information_from_sums(own)
    assert told["specialization"] == 1 > told["specialization_by_chance_high"]
