"""Small random models of every supported family: sizes that all take, and those of each."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from l2r.hf.swap.families import Family
from l2r.hf.swap.sites import old_weight, router_sites

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
}


def tiny_model(family: Family, **sizes: Any) -> Any:
    """Build a small random model of a family, with routers that prefer some experts clearly."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = CONFIG_MAPPING[family.model_type](
            **{**TINY, **OWN_SIZES[family.model_type], **sizes}
        )
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for site in router_sites(model):
                old_weight(site).normal_(0, 0.5)
                bias = getattr(site.router, "bias", None)
                if bias is not None:  # gpt-oss adds one to its logits; no router of ours does
                    bias.zero_()
            for name, value in [*model.named_parameters(), *model.named_buffers()]:
                if name.endswith(("e_score_correction_bias", "expert_bias")):
                    value.normal_(0, 0.3)
    return model


def sample_tokens(rows: int = 2) -> Tensor:
    """Draw fixed token ids, without special ones."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, TINY["vocab_size"], (rows, 12), generator=generator)
