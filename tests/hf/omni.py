"""A small Qwen3-Omni: a thinker that reads, a talker with routers of its own, and a vocoder."""

import torch
from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

from tests.hf.family_sizes import AROUND, OWN_SIZES, TINY

_THINKER = "qwen3_omni_moe_thinker"


def omni():
    """Weights of the whole are drawn: transformers leaves the talker's experts as memory was."""
    text = {**TINY, **OWN_SIZES[_THINKER]}
    talker = {
        "text_config": {**text, "shared_expert_intermediate_size": 16},
        "code_predictor_config": {**TINY, "head_dim": 8, "num_code_groups": 4},
        "spatial_merge_size": 2,
        "thinker_hidden_size": 32,
        "num_code_groups": 4,
        "accept_hidden_layer": 1,
    }
    sound = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "decoder_dim": 32, "codebook_size": 16,
        "num_quantizers": 4, "upsample_rates": [2], "upsampling_ratios": [2],
    }  # fmt: skip
    thinker = {**AROUND[_THINKER], "text_config": text}
    config = Qwen3OmniMoeConfig(thinker_config=thinker, talker_config=talker, code2wav_config=sound)
    model = Qwen3OmniMoeForConditionalGeneration(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.2)
    return model
