"""Robustness of routing to noise, and flips in bf16, against counts made by hand."""

import statistics

import pytest
import torch

from l2r import build_router
from l2r.analysis.diagnostics import robustness
from l2r.analysis.diagnostics.robustness import bf16_copy, count_flips
from l2r.hf.checkpoints import load_pretrained
from l2r.hf.swap import selection_biases
from l2r.hf.swap.families import FAMILIES
from l2r.routers.observe import find_routers
from l2r.stats import intervals
from tests.analysis.diagnostics.models import batches, ours
from tests.hf.families import tiny_model


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


def run(model, batch):
    return model(input_ids=batch["input_ids"], use_cache=False)


def sets_of(model, data):
    """Sets of experts by token and layer, seen by a hook of our own."""
    chosen = [[] for _ in find_routers(model)]
    handles = [
        router.register_forward_hook(
            lambda m, a, output, rows=rows: rows.extend(map(frozenset, output[2].tolist()))
        )
        for rows, router in zip(chosen, find_routers(model).values(), strict=True)
    ]
    with torch.no_grad():
        for batch in data:
            run(model, batch)
    for handle in handles:
        handle.remove()
    return list(zip(*chosen, strict=True))


def test_a_model_flips_nothing_against_itself():
    model = ours()
    assert count_flips(model, model, batches(), run) == (0, 0)


def test_flips_are_counted_per_decision_and_per_token():
    model, other, data = ours(), ours(), batches(5)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn_like(parameter))
    pairs = list(zip(sets_of(model, data), sets_of(other, data), strict=True))
    by_token = [[a != b for a, b in zip(*pair, strict=True)] for pair in pairs]
    decisions = sum(map(sum, by_token)) / (2 * len(by_token))
    tokens = sum(map(any, by_token)) / len(by_token)
    assert 0 < decisions < tokens < 1  # else the case shows nothing
    assert count_flips(model, other, data, run) == pytest.approx((decisions, tokens))


def test_a_bf16_copy_chooses_as_a_bf16_load(tmp_path):
    model, data = ours(), batches(5)
    model.save_pretrained(tmp_path)
    loaded = load_pretrained(tmp_path, dtype=torch.bfloat16)
    copy = bf16_copy(model)
    dtypes = {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    assert {name: parameter.dtype for name, parameter in copy.named_parameters()} == dtypes
    assert sets_of(copy, data) == sets_of(loaded, data)


@pytest.mark.parametrize("name", ["minimax_m2", "lfm2_moe", "afmoe", "hy_v3"])
def test_a_selection_bias_of_the_block_is_not_rounded(name):
    model = tiny_model(FAMILIES[name])
    copied, biases = bf16_copy(model), selection_biases(model)
    assert any(parameter.dtype == torch.bfloat16 for parameter in copied.parameters())
    for path, bias in selection_biases(copied).items():
        assert bias.dtype == torch.float32 and torch.equal(bias, biases[path])


def test_no_batch_is_refused():
    with pytest.raises(ValueError, match="batches must hold at least one"):
        count_flips(ours(), ours(), [], run)
