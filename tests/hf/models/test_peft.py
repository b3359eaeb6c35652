"""PEFT on our own OLMoE adapts what it adapts on transformers' OLMoE, the router apart."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from l2r import L2RConfig
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.hf.swap.families import FAMILIES
from tests.hf.families import TINY, sample_tokens, tiny_model

# PEFT 0.x still asks transformers 5 by a deprecated name, and warns of patterns of its own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]


def own():
    sizes = {k: v for k, v in TINY.items() if k != "moe_intermediate_size"}
    router = L2RConfig(rank=2, heads=4).to_dict()
    return L2rOlmoeForCausalLM(L2rOlmoeConfig(**sizes, num_experts=8, router=router)).eval()


def adapted(model, targets):
    """Shapes of the adapters by name, those of the router left out."""
    model = get_peft_model(model, LoraConfig(r=2, target_modules=targets))
    parameters = model.named_parameters()
    return {n: tuple(p.shape) for n, p in parameters if "lora_" in n and ".gate." not in n}


@pytest.mark.parametrize(
    "targets",
    ["all-linear", ["q_proj", "gate_proj", "up_proj", "down_proj"], ["gate_proj", "up_proj"]],
    ids=str,
)
def test_the_experts_of_our_olmoe_are_adapted_as_those_of_stock(targets):
    stock = tiny_model(FAMILIES["olmoe"])
    expected = adapted(stock, targets)
    assert any("experts" in name for name in expected)
    assert adapted(own(), targets) == expected


def test_adapters_of_the_experts_come_back_from_disk(tmp_path):
    model, ids = own(), sample_tokens()
    model.save_pretrained(tmp_path / "base")
    model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
        trained = model(input_ids=ids).logits
    model.save_pretrained(tmp_path / "adapter")
    base = L2rOlmoeForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        assert not torch.equal(base(input_ids=ids).logits, trained)
        again = PeftModel.from_pretrained(base, tmp_path / "adapter")
        assert torch.equal(again(input_ids=ids).logits, trained)
        merged = again.merge_and_unload()
        torch.testing.assert_close(merged(input_ids=ids).logits, trained, atol=1e-5, rtol=1e-4)
