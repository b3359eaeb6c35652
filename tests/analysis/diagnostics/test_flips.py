"""Flipped routes against sets of experts compared by hand."""

import pytest
import torch

from l2r.analysis.diagnostics.flips import bf16_copy, count_flips
from l2r.hf.checkpoints import load_pretrained
from l2r.hf.swap import selection_biases
from l2r.hf.swap.families import FAMILIES
from l2r.routers.observe import find_routers
from tests.analysis.diagnostics.models import batches, ours
from tests.hf.families import tiny_model


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
