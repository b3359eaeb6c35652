"""A folder with code runs in vLLM's Transformers backend only where its layers are alike there."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from l2r.errors import InputError
from l2r.hf.checkpoints import export_remote_code
from l2r.hf.models.even_heads import check_even_heads
from l2r.hf.swap import swap_routers
from tests.hf.families import auto_class, tiny_config

pytestmark = pytest.mark.filterwarnings("ignore::l2r.hf.swap.swap.UntrainedRoutersWarning")
# What differs from the tiny sizes, and what is said; None where all layers are alike.
FAMILIES = {
    "mimo_v2_flash": ({}, "num_key_value_heads=2; layer 1 of MiMoV2FlashForCausalLM has 4"),
    "laguna": (
        {"num_attention_heads_per_layer": [4, 8]},
        "num_attention_heads=4; layer 1 of LagunaForCausalLM has 8",
    ),
    "qwen3_moe": ({}, None),
    "gpt_oss": ({}, None),
    "deepseek_v3": ({}, None),
    "deepseek_ocr2": ({}, None),  # what sees has other heads, and is not vLLM's
}


@pytest.fixture(autouse=True)
def backend():
    """Attention as vLLM's backend registers it, which is never called here."""
    ALL_ATTENTION_FUNCTIONS.register("vllm", lambda *args, **options: None)
    yield
    del ALL_ATTENTION_FUNCTIONS._global_mapping["vllm"]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_with_other_heads_are_refused_in_vllms_backend_alone(family):
    changes, line = FAMILIES[family]
    config = tiny_config(family, **changes)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    check_even_heads(model)
    model.config.get_text_config()._attn_implementation = "vllm"
    if line is None:
        check_even_heads(model)
        return
    with pytest.raises(InputError, match="its answers would be wrong") as error:
        check_even_heads(model)
    assert line in str(error.value)


def test_the_code_of_an_exported_folder_refuses_them(tmp_path):
    model = AutoModelForCausalLM.from_config(tiny_config("mimo_v2_flash"))
    export_remote_code(swap_routers(model).model, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    config._attn_implementation = "vllm"
    with pytest.raises(ValueError, match="layer 1 of L2rMiMoV2FlashForCausalLM has 4"):
        AutoModelForCausalLM.from_config(config, trust_remote_code=True)
