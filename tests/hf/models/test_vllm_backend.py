"""A folder with code runs in vLLM's Transformers backend only where that computes its model."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from l2r.errors import InputError
from l2r.hf.checkpoints import export_remote_code
from l2r.hf.models.vllm_backend import check_backend
from l2r.hf.swap import swap_routers
from tests.hf.families import auto_class, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore::l2r.hf.swap.swap.UntrainedRoutersWarning")
SWIGLU = r"computes silu\(gate\) . up in experts; model.*.experts of .* computes otherwise"
# What differs from the tiny sizes, and what is said; None where the backend computes the model.
FAMILIES = {
    "mimo_v2_flash": ({}, "num_key_value_heads=2; model.layers.1.self_attn of .* has 4"),
    "laguna": (
        {"num_attention_heads_per_layer": [4, 8]},
        "num_attention_heads=4; model.layers.1.self_attn of LagunaForCausalLM has 8",
    ),
    "longcat_flash": ({}, "needs weights for each expert; model.layers.0.mlp.experts"),
    "minimax_m3_vl_text": ({}, SWIGLU),
    "hy_v4": ({}, SWIGLU),
    "nemotron_h": ({}, SWIGLU),
    "step3p7": ({"swiglu_limits": [0.0, 7.0]}, SWIGLU),
    "qwen3_moe": ({}, None),
    "qwen3_moe, gelu": ({"hidden_act": "gelu"}, SWIGLU),
    "gpt_oss": ({}, None),  # of another form, which the backend knows
    "deepseek_v3": ({}, None),
    "lfm2_moe": ({}, None),
    "aria_text": ({}, None),
    "deepseek_ocr2": ({}, None),  # what sees has other heads, and is not vLLM's
}


@pytest.fixture(autouse=True)
def backend():
    """Attention as vLLM's backend registers it, which is never called here."""
    ALL_ATTENTION_FUNCTIONS.register("vllm", lambda *args, **options: None)
    yield
    del ALL_ATTENTION_FUNCTIONS._global_mapping["vllm"]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_vllms_backend_computes_otherwise_is_refused_in_it_alone(family):
    changes, line = FAMILIES[family]
    config = tiny_config(family.partition(",")[0], **changes)
    with torch.device("meta"):  # as vLLM builds it
        model = auto_class(config).from_config(config)
        check_backend(model)
        model.config.get_text_config()._attn_implementation = "vllm"
        if line is None:
            check_backend(model)
            return
        with pytest.raises(InputError, match=line) as error:
            check_backend(model)
    assert "answers would be wrong" in str(error.value)


def test_the_code_of_an_exported_folder_refuses_them(tmp_path):
    model = AutoModelForCausalLM.from_config(tiny_config("mimo_v2_flash"))
    export_remote_code(swap_routers(model).model, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    config._attn_implementation = "vllm"
    with pytest.raises(ValueError, match=r"layers.1.self_attn of L2rMiMoV2FlashForCausalLM has"):
        AutoModelForCausalLM.from_config(config, trust_remote_code=True)
