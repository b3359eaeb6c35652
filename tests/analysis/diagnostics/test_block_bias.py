"""Families whose block passes a selection bias to its router are diagnosed with it."""

import pytest
import torch
from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

from l2r import swap_routers
from l2r.analysis.diagnostics import DiagnosisSettings, collect_records, diagnose_layers
from l2r.analysis.diagnostics.robustness import perturbation_stability

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
