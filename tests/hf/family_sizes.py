"""Sizes of the small models of every supported family: those that all take, and those of each."""

from collections.abc import Mapping
from typing import Any

TINY: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_E = {"num_experts": 8}
_L = {"num_local_experts": 8}
_HEAD = {"head_dim": 8}
_SHARED = {"shared_expert_intermediate_size": 16}
_FULL = {"layer_types": ["full_attention", "full_attention"]}
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_GROUPS = {"n_group": 2, "topk_group": 1}
_DEEPSEEK = {
    **_GROUPS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
}
_DELTA_NET = {
    **_E,
    **_HEAD,
    **_SHARED,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_JAMBA = {
    **_E,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "use_mamba_kernels": False,
}
_NEMOTRON = {
    **_GROUPS,
    **_HEAD,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 16,
    "layers_block_type": ["attention", "moe"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
}
_ERNIE_EXPERTS = {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1}
_ERNIE = {**_HEAD, **_ERNIE_EXPERTS, "moe_layer_start_index": 1}
_HYBRID = {
    **_L,
    "shared_intermediate_size": 16,
    "layer_types": ["attention", "attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
}
_EXAONE = {
    **_E,
    **_GROUPS,
    **_HEAD,
    **_FULL,
    "num_shared_experts": 1,
    "mlp_layer_types": ["dense", "sparse"],
}
_CONV = {"layer_types": ["conv", "full_attention"], "use_expert_bias": True}
_LFM2 = {**_E, **_CONV, "num_dense_layers": 1, "norm_topk_prob": True}
_AFMOE = {**_E, **_HEAD, **_FULL, "num_dense_layers": 1, "num_shared_experts": 1}
_HY_V3 = {**_E, **_HEAD, "first_k_dense_replace": 1, "num_shared_experts": 1}
_DSA = {**_MLA, **_DEEPSEEK, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
_DEEPSEEK_V2 = {**_MLA, **_DEEPSEEK, "topk_method": "group_limited_greedy"}

_V3_TINY = {**_DEEPSEEK, **_HEAD}
_V3_MLA_TINY = {**_MLA, **_DEEPSEEK}

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = {**_ROPE, "mrope_section": [2, 1, 1]}
_MROPE = {"rope_parameters": _SECTIONS}
_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
_INDEX = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
_KDA = {"num_local_experts": 8, "layer_types": ["linear_attention", "full_attention"]}
_QSA = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}
_OCR = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "topk_method": "group_limited_greedy",
    **_GROUPS,
    **_SPARSE,
}
# Two layers that choose by token ids, two that choose by logits.
_DEEPSEEK_V4 = {
    **_INDEX,
    "num_hidden_layers": 4,
    "num_hash_layers": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "n_routed_experts": 8,
    "hc_mult": 2,
    "sliding_window": 8,
    "partial_rotary_factor": 0.5,
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
}
_GLM5 = {
    **_V3_MLA_TINY,
    **_INDEX,
    **_SPARSE,
    "layer_types": ["linear_attention", "full_attention"],
    "qk_rope_head_dim": 0,
    "index_kpool": 2,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "hc_mult": 2,
}
_ERNIE_VL = {
    **_ERNIE_EXPERTS,
    "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
    "moe_intermediate_size": [16, 16],
}
_MINIMAX_M3 = {
    **_L,
    **_HEAD,
    "dense_intermediate_size": 32,
    "shared_intermediate_size": 16,
    "rotary_dim": 8,
}
_STEP = {
    **_HEAD,
    **_SPARSE,
    "n_routed_experts": 8,
    "share_expert_dim": 16,
    "sliding_window": 8,
    "moe_router_scaling_factor": 1.5,
}
_INKLING2 = {
    **_HEAD,
    "n_routed_experts": 8,
    "scoring_func": "sqrtsoftplus",
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 8,
    "d_rel": 4,
    "rel_extent": 16,
    "unpadded_vocab_size": 64,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "n_layers_per_attn_res_block": 1,
}
_INKLING2_LOOP = {
    **_INKLING2,
    "scoring_func": "sigmoid",
    "num_hidden_layers": 3,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid"],
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 2,
    "loop_num_passes": 2,
    "loop_gate_rank": 4,
}
_LONGCAT = {
    **_MLA,
    "num_layers": 2,
    "n_routed_experts": 6,
    "zero_expert_num": 2,
    "moe_topk": 2,
    "ffn_hidden_size": 32,
    "expert_ffn_hidden_size": 16,
    "head_dim": 8,
}

OWN_SIZES: Mapping[str, Mapping[str, Any]] = {
    "olmoe": _E,
    "flex_olmo": _E,
    "qwen2_moe": {**_E, **_SHARED},
    "qwen3_moe": {**_E, **_HEAD},
    "qwen3_next": _DELTA_NET,
    "mellum": {**_E, **_HEAD},
    "jamba": _JAMBA,
    "mixtral": _L,
    "minimax": {**_L, **_HEAD, "block_size": 8},
    "qwen3_5_moe_text": _DELTA_NET,
    "hunyuan_v1_moe": {**_E, **_HEAD, "moe_topk": 2},
    "gpt_oss": {**_L, **_HEAD},
    "granitemoe": _L,
    "granitemoeshared": {**_L, "shared_intermediate_size": 16},
    "granitemoehybrid": _HYBRID,
    "cohere2_moe": {**_E, **_HEAD, **_FULL},
    "phimoe": _L,
    "ernie4_5_moe": _ERNIE,
    "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _V3_MLA_TINY,
    "deepseek_v32": _DSA,
    "glm4_moe": _V3_TINY,
    "glm4_moe_lite": _V3_MLA_TINY,
    "dots1": _V3_TINY,
    "solar_open": _V3_TINY,
    "exaone_moe": _EXAONE,
    "nemotron_h": _NEMOTRON,
    "laguna": {**_E, **_HEAD, **_SHARED},
    "minimax_m2": {**_L, **_HEAD},
    "lfm2_moe": _LFM2,
    "afmoe": _AFMOE,
    "hy_v3": _HY_V3,
    "lara_mini": _DELTA_NET,
    "qwen4_exp_text": {**_DELTA_NET, **_QSA, "hc_count": 2, "hc_lowrank": 4},
    "qwen3_omni_moe_thinker": {**_E, **_HEAD, **_MROPE},
    "qwen3_vl_moe": {**_E, **_HEAD, **_MROPE},
    "aria_text": {**_HEAD, "moe_num_experts": 8, "moe_topk": 2, "moe_num_shared_experts": 1},
    "granitemoe_swa": {**_L, "layer_types": ["full_attention", "sliding_attention"]},
    "openai_privacy_filter": {**_L, **_HEAD, "num_labels": 64},
    "mistral4": {**_MLA, **_DEEPSEEK, "first_k_dense_replace": 0},
    "mistral_large4": _DSA,
    "ernie4_5_vl_moe": _ERNIE_VL,
    "unlimited_ocr": _OCR,
    "deepseek_ocr2": _OCR,
    "deepseek_v4": _DEEPSEEK_V4,
    "glm_moe_dsa": _DSA,
    "glm5_next": _GLM5,
    "glm4v_moe": {**_V3_TINY, "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 1.0}},
    "kimi_linear": {**_V3_MLA_TINY, **_KDA, "linear_head_dim": 8, "linear_num_heads": 4},
    "hy_v4": {**_DSA, "hc_mult": 2, "initializer_range": 0.2},
    "hy_v4_vl": {**_DSA, "hc_mult": 2, "rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}},
    "axk1": _V3_MLA_TINY,
    "axk2": {**_DSA, "gated_norm_rank": 4},
    "bailing_hybrid": {**_V3_MLA_TINY, **_KDA, **_HEAD, "num_mtp_layers": 0},
    "dots3_note_text": {**_DSA, "head_dim": 16, "shared_experts_intermediate_size": 16},
    "mimo_v2_flash": {**_V3_TINY, **_SPARSE, "v_head_dim": 8},
    "beam": {**_E, **_GROUPS, **_HEAD, **_SPARSE},
    "minimax_m3_vl_text": _MINIMAX_M3,
    "step3p7": _STEP,
    "muse_spark": {**_L, **_HEAD, "moe_hidden_size": 16, "sliding_window": 8},
    "flint": {**_E, **_HEAD, **_SHARED, "mlp_only_layers": [0]},
    "kolibri1": {**_E, **_HEAD, **_SHARED},
    "inkling2_text": _INKLING2,
    "inkling2_loop_text": _INKLING2_LOOP,
    "longcat_flash": _LONGCAT,
}

# What stands around the text model of those that transformers opens whole.
_VISION = {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32, "patch_size": 4}
_QWEN = {"depth": 1, "num_heads": 2, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_GLM = {"depth": 1, "num_heads": 2, "image_size": 8}
_LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2}
_AUDIO = {
    "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
    "num_mel_bins": 16, "output_dim": 32, "downsample_hidden_size": 8,
}  # fmt: skip
_MUSE_AUDIO = {
    "patch_sizes": [4], "hidden_sizes": [8], "depths": [1], "num_hidden_layers": 1,
    "out_hidden_size": 32,
}  # fmt: skip
_SAM = {
    **_LAYERS, "hidden_size": 16, "output_channels": 8, "image_size": 16, "patch_size": 4,
    "mlp_dim": 16, "global_attn_indexes": [0], "downsample_channels": [8, 16],
}  # fmt: skip
_SEEN = {"vision_config": {**_VISION, **_LAYERS}}
AROUND: Mapping[str, Mapping[str, Any]] = {
    "qwen3_omni_moe_thinker": {
        "vision_config": {**_VISION, **_QWEN}, "audio_config": _AUDIO, "vision_start_token_id": 60,
        "audio_start_token_id": 61,
    },
    "qwen3_vl_moe": {"vision_config": {**_VISION, **_QWEN}},
    "glm4v_moe": {"vision_config": {**_VISION, **_GLM}},
    "glm5_next": {"vision_config": {**_VISION, **_GLM, "projection_intermediate_size": 16}},
    "hy_v4_vl": {"vision_config": {**_VISION, **_LAYERS, "max_image_size": 16}},
    "mistral_large4": {
        "vision_config": {
            **_LAYERS, "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16,
            "image_size": 8, "patch_size": 4,
        }
    },
    "ernie4_5_vl_moe": {"vision_config": {**_VISION, "depth": 1, "num_heads": 2}},
    "step3p7": {"vision_config": {**_VISION, **_LAYERS, "image_size": 8}},
    "muse_spark": {
        **_SEEN, "audio_config": _MUSE_AUDIO, "out_hidden_size": 16, "projector_hidden_size": 16,
    },
    "unlimited_ocr": {
        "vision_config": {"sam_config": _SAM, "encoder_config": {**_VISION, **_LAYERS}}
    },
    "deepseek_ocr2": {
        "vision_config": {"sam_config": _SAM, "encoder_config": {**_VISION, **_LAYERS}}
    },
}  # fmt: skip
