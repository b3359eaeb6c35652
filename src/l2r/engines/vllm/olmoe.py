"""vLLM's OLMoE with a router of ours; imported by vLLM, by the name that ``register`` gives."""

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.olmoe import (
    OlmoeAttention,
    OlmoeDecoderLayer,
    OlmoeForCausalLM,
    OlmoeMoE,
)
from vllm.model_executor.models.utils import WeightsMapper

from l2r.engines.served_olmoe import RENAMED, gate_of


class L2rOlmoeMoE(OlmoeMoE):
    """vLLM's experts behind our gate; its forward is inherited."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        nn.Module.__init__(self)
        config = vllm_config.model_config.hf_config
        self.hidden_size = config.hidden_size
        self.gate = gate_of(config)
        self.experts = FusedMoEFactory(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            renormalize=False,
            quant_config=vllm_config.quant_config,
            router_logits_dtype=torch.float32,  # also where ranks exchange them
            prefix=f"{prefix}.experts",
        )


class L2rOlmoeDecoderLayer(OlmoeDecoderLayer):
    """vLLM's layer, built with our block: its own would register experts of the same name."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        nn.Module.__init__(self)
        config = vllm_config.model_config.hf_config
        self.hidden_size = config.hidden_size
        self.self_attn = OlmoeAttention(vllm_config=vllm_config, prefix=f"{prefix}.self_attn")
        self.mlp = L2rOlmoeMoE(vllm_config, prefix=f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class L2rOlmoeForCausalLM(OlmoeForCausalLM):
    """Named as in config.json's ``architectures``."""

    hf_to_vllm_mapper = OlmoeForCausalLM.hf_to_vllm_mapper | WeightsMapper(
        orig_to_new_substr=dict([RENAMED])
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=L2rOlmoeDecoderLayer)
