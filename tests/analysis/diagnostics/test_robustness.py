"""Stability and Top-k Overlap under noise; intervals."""

import statistics

import pytest
import torch

from l2r import build_router
from l2r.analysis.diagnostics import robustness
from l2r.stats import intervals


def _router(kind="l2r_sips", **options):
    torch.manual_seed(0)
    return build_router(kind, hidden_size=16, num_experts=8, top_k=3, **options)


def test_stability_equals_a_loop_over_tokens():
    router, x = _router(), torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
    got = robustness.perturbation_stability(router, x, sigma=0.3, seed=5, repeats=3)
    generator = torch.Generator().manual_seed(5)
    kept, overlaps = [], []
    for _ in range(3):
        noisy = x + 0.3 * torch.randn(x.shape, generator=generator)
        before, after = router(x).indices.tolist(), router(noisy).indices.tolist()
        pairs = list(zip(before, after, strict=True))
        kept.append(statistics.fmean(a[0] == b[0] for a, b in pairs))
        jaccard = [len(set(a) & set(b)) / len(set(a) | set(b)) for a, b in pairs]
        overlaps.append(statistics.fmean(jaccard))
    assert 0 < got["stability"].mean < 1
    assert got["stability"].mean == pytest.approx(statistics.fmean(kept))
    assert got["topk_overlap"].mean == pytest.approx(statistics.fmean(overlaps))
    half = 4.3027 * statistics.stdev(kept) / 3**0.5
    assert got["stability"].high - got["stability"].mean == pytest.approx(half)


def test_no_noise_changes_nothing_and_a_seed_repeats():
    router, x = _router("linear"), torch.randn(30, 16)
    still = robustness.perturbation_stability(router, x, sigma=0.0)
    assert still["stability"] == (1, 1, 1)
    assert still["topk_overlap"] == (1, 1, 1)
    first, again, other = (
        robustness.perturbation_stability(router, x, sigma=0.5, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_chunks_cover_every_token_once(monkeypatch):
    router, x = _router(), torch.randn(50, 16)
    monkeypatch.setattr(robustness, "CHUNK", 7)
    chunked = robustness.perturbation_stability(router, x, sigma=0.0, repeats=1)
    assert chunked["stability"].mean == 1
    assert chunked["topk_overlap"].mean == 1


def test_noise_leaves_batch_norm_statistics_and_modes_alone():
    router = _router(query_norm="batchnorm").train()
    before = router.magnitude_norm.running_mean.clone()
    robustness.perturbation_stability(router, torch.randn(20, 16))
    assert torch.equal(router.magnitude_norm.running_mean, before)
    assert router.training
    assert router.magnitude_norm.training


def test_bad_input_is_named():
    router = _router()
    for sigma in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"sigma must be between .*; got {sigma}"):
            robustness.perturbation_stability(router, torch.ones(2, 16), sigma=sigma)
    with pytest.raises(ValueError, match="repeats >= 1 and tokens >= 1; got 5 and 0"):
        robustness.perturbation_stability(router, torch.ones(0, 16))


def test_interval_of_one_value_of_many_and_of_none():
    assert intervals.mean_interval([0.3]) == (0.3, 0.3, 0.3)
    values = [float(i % 7) for i in range(200)]
    got = intervals.mean_interval(values)
    half = 1.97196 * statistics.stdev(values) / 200**0.5  # t quantile for 199 degrees of freedom
    assert got.high - got.mean == pytest.approx(half, rel=1e-4)
    with pytest.raises(ValueError, match="at least 1 value"):
        intervals.mean_interval([])
