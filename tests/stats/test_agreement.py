"""Agreement of routers: independent computations, and pairs whose agreement is known."""

from itertools import permutations

import numpy as np
import pytest
from sklearn.metrics import adjusted_mutual_info_score, mutual_info_score

from l2r.files.diagnosis import Diagnosis, agree
from l2r.stats import agreement as of
from l2r.stats.chance import DRAWS, by_chance, other_rows

ROWS, LENGTH, EXPERTS, K = 40, 30, 4, 2
RENAMED = np.array([2, 0, 3, 1])


def _experts(seed, rows=ROWS, length=LENGTH):
    generator = np.random.default_rng(seed)
    scores = generator.gumbel(size=(rows, length, EXPERTS)) + np.arange(EXPERTS) / 2
    return scores.argsort(axis=2)[..., ::-1][..., :K]


def _noisy(experts, seed, share=0.4):
    other = np.random.default_rng(seed).random(experts.shape[:2]) < share
    return np.where(other[..., None], _experts(seed + 1, *experts.shape[:2]), experts)


def test_overlap_equals_sets_and_is_one_for_the_same_checkpoint():
    a, b = _experts(0), _noisy(_experts(0), 1)
    a[3, 5:] = b[3, 5:] = -1
    pairs = [
        (x, y)
        for x, y in zip(a.reshape(-1, K).tolist(), b.reshape(-1, K).tolist(), strict=True)
        if x[0] >= 0
    ]
    got = of.overlap(a, b)
    assert got.top1 == pytest.approx(np.mean([x[0] == y[0] for x, y in pairs]))
    assert got.topk == pytest.approx(np.mean([len({*x} & {*y}) / K for x, y in pairs]))
    assert of.overlap(a, a) == (1, 1)


def test_overlap_by_chance_is_that_of_the_loads():
    a = _experts(0, rows=200)
    load = np.bincount(a[..., 0].ravel()) / a[..., 0].size
    chance = of.overlap_by_chance(a, a)
    # 39 draws of 200 rows x 30 tokens; 5 deviations of a share of one half
    assert chance.top1 == pytest.approx((load**2).sum(), abs=5 * 0.5 / np.sqrt(200 * 30))
    assert of.overlap_by_chance(a[:1], a[:1]) is None


def test_agreement_is_one_under_a_permutation_of_experts_and_none_is_chance():
    a = _experts(0)
    for other in (a, RENAMED[a]):
        got = of.agreement(a, other)
        assert got.information == pytest.approx(1, abs=1e-12) and got.matched == 1
        assert got.by_chance < 0.6
    apart = of.agreement(a, _experts(1))
    assert abs(apart.information) < 0.01 and abs(apart.matched - apart.by_chance) < 0.05
    assert of.agreement(a[:1], a[:1]) is None


def test_adjusted_information_equals_the_usual_one_where_every_token_is_a_document():
    a = _experts(0, rows=600, length=1)
    b = RENAMED[_noisy(a, 3)]
    expected = adjusted_mutual_info_score(a[:, 0, 0], b[:, 0, 0])
    draws = [mutual_info_score(a[:, 0, 0], b[r, 0, 0]) for r in other_rows(600)]
    # five errors of the mean over draws, over what the denominator is at least: an entropy of
    # half of log N less chance
    error = 5 * np.std(draws) / np.sqrt(DRAWS) / (np.log(EXPERTS) / 2 - np.mean(draws))
    assert of.agreement(a, b).information == pytest.approx(expected, abs=error)


def test_one_expert_for_all_agrees_with_itself():
    always = np.zeros((4, 5, 1), np.int64)
    assert of.agreement(always, always) == (1, 1, 1)


def test_the_best_matching_is_the_best_of_all():
    a, b = _experts(0), RENAMED[_noisy(_experts(0), 5)]
    best = max(
        np.mean(np.array(names)[b[..., 0]] == a[..., 0]) for names in permutations(range(EXPERTS))
    )
    assert of.agreement(a, b).matched == pytest.approx(best)


def test_a_router_that_agrees_in_half_the_documents_lies_between():
    a, b = _experts(0), _experts(1)
    b[::2] = RENAMED[a[::2]]
    got = of.agreement(a, b)
    assert 0.1 < got.information < 0.9 and got.by_chance < got.matched < 0.9


def test_only_what_read_the_same_tokens_is_compared():
    def view(data, depth=2):
        arrays = {f"{i}.experts": _experts(i) for i in range(depth)}
        return Diagnosis({"data": data}, [{}] * depth, arrays)

    assert len(agree(view(1), view(1))) == 2
    for other in (view(2), view(1, depth=3), Diagnosis({}, [{}, {}], {})):
        assert agree(view(1), other) == []
    assert agree(Diagnosis({}, [{}], {}), Diagnosis({}, [{}], {})) == []


def test_other_rows_are_never_the_own_one_and_chance_spans_its_draws():
    for rows in (2, 3, 17):
        for others in other_rows(rows):
            assert sorted(others) == list(range(rows)) and (others != np.arange(rows)).all()
    draws = [float(others[0]) for others in other_rows(17)]
    assert by_chance(17, lambda others: float(others[0])) == pytest.approx(
        (np.mean(draws), min(draws), max(draws))
    )
    assert len(draws) == DRAWS and by_chance(1, lambda others: 0.0) is None
