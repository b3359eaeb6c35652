"""Families whose block passes a selection bias to its router are diagnosed with it."""

import pytest
import torch
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

from l2r import swap_routers
from l2r.analysis.certificates.certify import certify, certify_first, holds_within
from l2r.analysis.diagnostics import DiagnosisSettings, collect_records, diagnose_layers
from l2r.analysis.diagnostics.robustness import perturbation_stability
from l2r.hf.swap.families import FAMILIES
from l2r.routers.observe import find_routers
from tests.hf.families import sample_tokens, tiny_model

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 8,
    "num_experts_per_tok": 2, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*untrained")
@pytest.mark.parametrize("swapped", [False, True])
def test_stability_is_measured_with_the_bias_and_no_certificate_is_given(swapped):
    torch.manual_seed(0)
    model = MiniMaxM2ForCausalLM(MiniMaxM2Config(**SIZES)).eval()
    if swapped:
        swap_routers(model)
    bias = model.model.layers[0].mlp.e_score_correction_bias
    with torch.no_grad():
        bias.copy_(torch.arange(8.0))  # larger than any sigmoid: it alone chooses
    (record,) = collect_records(model, [{"input_ids": torch.randint(2, 64, (2, 16))}])
    assert record.sums["usage"]["topk"].nonzero().flatten().tolist() == [6, 7]
    numbers = diagnose_layers([record], settings=DiagnosisSettings(sigma=5.0)).layers[0]
    assert numbers["topk_overlap"] == 1  # whatever the noise
    assert "of its block; no certificate is known" in numbers["certificate"]
    if swapped:
        without = perturbation_stability(record.router, record.inputs(), sigma=5.0)
        assert without["topk_overlap"].mean < 1


def test_a_router_that_takes_rows_gets_rows():
    """AFMoE's reads three dimensions; a sample of tokens has two."""
    model = tiny_model(FAMILIES["afmoe"])
    (record,) = collect_records(model, [{"input_ids": sample_tokens()}])
    assert record.as_passed().shape == (1, *record.inputs().shape)
    numbers = diagnose_layers([record], settings=DiagnosisSettings(sigma=0.5)).layers[0]
    x = record.inputs()
    _, _, plain = record.router(x[None], *record.more)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    _, _, moved = record.router((x + 0.5 * noise)[None], *record.more)
    both = (plain[:, :, None] == moved[:, None, :]).any(dim=-1).sum(dim=-1).double()
    settings = DiagnosisSettings(sigma=0.5, repeats=1)
    once = diagnose_layers([record], settings=settings).layers[0]["topk_overlap"]
    assert once == pytest.approx((both / (4 - both)).mean().item())
    assert 0 < numbers["topk_overlap"] < 1


@pytest.mark.parametrize("family", ["lfm2_moe", "minimax_m2", "afmoe", "hy_v3"])
def test_no_certificate_is_tried_where_the_block_has_a_say(family):
    """LFM2's router has a default for the bias of its block, and then adds None."""
    (router,) = list(find_routers(tiny_model(FAMILIES[family])).values())[-1:]
    x = torch.randn(5, 32)
    for call in (certify, certify_first, lambda *given: holds_within(*given, torch.ones(5))):
        with pytest.raises(ValueError, match="chooses by its logits and a bias of its block"):
            call(router, x)
