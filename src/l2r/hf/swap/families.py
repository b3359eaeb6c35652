"""Model families whose routers can be replaced, and the selection each one keeps.

A family is recognized by the class name of its router, so that models built around the same
decoder (vision-language models, classifiers) are recognized too. Every router here returns
(logits [T, N], weights [T, K], indices [T, K]); selections are read from the router being replaced.
``tiny`` is the configuration of a small random model, from which docs/families.md is made.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from l2r.routers.selection import Selection


@dataclass(frozen=True)
class Family:
    """One family. rule: from the old router to how it selects.

    weight: path of the old router's [N, D] matrix. tiny: keywords of a small configuration.
    """

    model_type: str
    router: str
    rule: Callable[[Any], Selection]
    tiny: Mapping[str, Any]
    weight: str = "weight"

    def selection(self, old: Any) -> Selection:
        """Selection of an old router of this family."""
        return replace(self.rule(old), family=self.model_type)


@dataclass(frozen=True, kw_only=True, repr=False)
class SparseMixer(Selection):
    """Phi-MoE's SparseMixer-v2: top-2, sampled in training with its own gradient estimate."""

    jitter: float

    def __call__(
        self, router: nn.Module, logits: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        from transformers.models.phimoe.modeling_phimoe import sparsemixer

        top_k: int = router.top_k  # type: ignore[assignment]
        weights, indices = sparsemixer(logits, self.jitter, router.training, top_k)
        return weights, indices

    def weigh(self, router: nn.Module, logits: Tensor, indices: Tensor) -> Tensor:
        """Weights of two given experts, the second among those that are left.

        An expert too far below the best to be sampled counts as if it were not.
        """
        first, second = indices[:, :1], indices[:, 1:]
        left = logits.scatter(-1, first, float("-inf"))
        pairs = ((logits, first), (left, second))
        return torch.cat([self._weigh_one(router, logits, *pair) for pair in pairs], dim=-1)

    def _weigh_one(
        self, router: nn.Module, logits: Tensor, candidates: Tensor, chosen: Tensor
    ) -> Tensor:
        with torch.no_grad():
            best = candidates.max(dim=-1, keepdim=True).values
            distance = (best - logits) / logits.abs().clamp(min=best)
            far = (distance > 2 * self.jitter).scatter(-1, chosen, False)
        gates = torch.softmax(candidates.masked_fill(far, float("-inf")), dim=-1)
        weight = gates.gather(-1, chosen)
        if not router.training:
            return weight
        from transformers.models.phimoe.modeling_phimoe import PhimoeMultiplier

        whole = chosen == gates.argmax(dim=-1, keepdim=True)
        whole = whole | (torch.rand_like(weight) > 0.75)
        share = torch.add(0.3333, whole, alpha=0.6667).type_as(gates)
        estimated: Tensor = PhimoeMultiplier.apply(logits, weight, chosen, gates, share)
        return estimated


def _softmax(old: Any) -> Selection:
    """Softmax over all experts, top-k, weights as they are or renormalized by a flag."""
    return Selection(normalize=getattr(old, "norm_topk_prob", False))


def _deepseek_v2(old: Any) -> Selection:
    limited = old.topk_method == "group_limited_greedy"
    return Selection(
        scale=old.routed_scaling_factor,
        groups=old.num_group if limited else 1,
        kept_groups=old.topk_group if limited else 1,
        group_best=1,
    )


def _cohere2(old: Any) -> Selection:
    if old.expert_selection_fn == "softmax":
        return Selection(normalize=True)
    return Selection(score="sigmoid", normalize=old.norm_topk_prob)


def _phimoe(old: Any) -> Selection:
    return SparseMixer(jitter=old.router_jitter_noise)


def _rule(read: Mapping[str, str], **fixed: Any) -> Callable[[Any], Selection]:
    """Fixed fields of a selection, and fields that are read from attributes of the old router."""
    return lambda old: Selection(**fixed, **{f: getattr(old, name) for f, name in read.items()})


# Also where the softmax is over the k chosen logits alone: the same weights.
_softmax_normalized = _rule({}, normalize=True)
# The original bounds the sum from below by the same constant instead of adding it.
_ernie = _rule({"norm_eps": "norm_min"}, normalize=True, bias="moe_statics.e_score_correction_bias")
_SCALED = {"normalize": "norm_topk_prob", "scale": "routed_scaling_factor"}
_V3 = _rule(
    {**_SCALED, "groups": "num_group", "kept_groups": "topk_group"},
    score="sigmoid",
    norm_eps=1e-20,
    bias="e_score_correction_bias",
)
_laguna = _rule({}, score="sigmoid", normalize=True, bias="e_score_correction_bias")
# From here on the selection bias belongs to the block and comes with each call.
_BLOCK: dict[str, Any] = {"score": "sigmoid", "block_bias": True}
_minimax_m2 = _rule({}, **_BLOCK, normalize=True)
_lfm2 = _rule(_SCALED, **_BLOCK, norm_eps=1e-6)
_afmoe = _rule({"scale": "route_scale"}, **_BLOCK, normalize=True, norm_eps=1e-20)
_hy_v3 = _rule({"scale": "router_scaling_factor"}, **_BLOCK, normalize=True, norm_eps=1e-20)

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

_V3_TINY = {**_DEEPSEEK, **_HEAD}
_V3_MLA_TINY = {**_MLA, **_DEEPSEEK}

_TABLE = (
    Family("olmoe", "OlmoeTopKRouter", _softmax, _E),
    Family("flex_olmo", "FlexOlmoTopKRouter", _softmax, _E),
    Family("qwen2_moe", "Qwen2MoeTopKRouter", _softmax, {**_E, **_SHARED}),
    Family("qwen3_moe", "Qwen3MoeTopKRouter", _softmax, {**_E, **_HEAD}),
    Family("qwen3_next", "Qwen3NextTopKRouter", _softmax, _DELTA_NET),
    Family("mellum", "MellumTopKRouter", _softmax, {**_E, **_HEAD}),
    Family("jamba", "JambaTopKRouter", _softmax, _JAMBA),
    Family("mixtral", "MixtralTopKRouter", _softmax_normalized, _L),
    Family("minimax", "MiniMaxTopKRouter", _softmax_normalized, {**_L, **_HEAD, "block_size": 8}),
    Family("qwen3_5_moe_text", "Qwen3_5MoeTopKRouter", _softmax_normalized, _DELTA_NET),
    Family(
        "hunyuan_v1_moe",
        "HunYuanMoEV1Gate",
        _softmax_normalized,
        {**_E, **_HEAD, "moe_topk": 2},
        weight="wg.weight",
    ),
    Family("gpt_oss", "GptOssTopKRouter", _softmax_normalized, {**_L, **_HEAD}),
    Family("granitemoe", "GraniteMoeTopKRouter", _softmax_normalized, _L),
    Family(
        "granitemoeshared",
        "GraniteMoeSharedTopKRouter",
        _softmax_normalized,
        {**_L, "shared_intermediate_size": 16},
    ),
    Family("granitemoehybrid", "GraniteMoeHybridTopKRouter", _softmax_normalized, _HYBRID),
    Family("cohere2_moe", "Cohere2MoeTopKRouter", _cohere2, {**_E, **_HEAD, **_FULL}),
    Family("phimoe", "PhimoeTopKRouter", _phimoe, _L),
    Family("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", _ernie, _ERNIE),
    Family("deepseek_v2", "DeepseekV2TopkRouter", _deepseek_v2, _DEEPSEEK_V2),
    Family("deepseek_v3", "DeepseekV3TopkRouter", _V3, _V3_MLA_TINY),
    Family("deepseek_v32", "DeepseekV32TopkRouter", _V3, _DSA),
    Family("glm4_moe", "Glm4MoeTopkRouter", _V3, _V3_TINY),
    Family("glm4_moe_lite", "Glm4MoeLiteTopkRouter", _V3, _V3_MLA_TINY),
    Family("dots1", "Dots1TopkRouter", _V3, _V3_TINY),
    Family("solar_open", "SolarOpenTopkRouter", _V3, _V3_TINY),
    Family("exaone_moe", "ExaoneMoeTopkRouter", _V3, _EXAONE),
    Family("nemotron_h", "NemotronHTopkRouter", _V3, _NEMOTRON),
    Family("laguna", "LagunaTopKRouter", _laguna, {**_E, **_HEAD, **_SHARED}),
    Family("minimax_m2", "MiniMaxM2TopKRouter", _minimax_m2, {**_L, **_HEAD}),
    Family("lfm2_moe", "Lfm2MoeTopKRouter", _lfm2, _LFM2),
    Family("afmoe", "AfmoeTokenChoiceRouter", _afmoe, _AFMOE, weight="gate.weight"),
    Family("hy_v3", "HYV3TopKRouter", _hy_v3, _HY_V3),
)

# Before these versions the router has another class, or returns its triple in another order.
_SINCE = dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoehybrid"), "5.21")
_SINCE["jamba"] = "5.20"
_TOO_NEW = {
    name: f"its router needs transformers >= {since}; this is {transformers.__version__}"
    for name, since in _SINCE.items()
    if Version(transformers.__version__) < Version(since)
}
FAMILIES: Mapping[str, Family] = {f.model_type: f for f in _TABLE if f.model_type not in _TOO_NEW}
BY_ROUTER: Mapping[str, Family] = {family.router: family for family in FAMILIES.values()}

_CAPACITY = "its router returns one-hot masks with expert capacity and drops tokens"
REFUSED: Mapping[str, str] = {
    **_TOO_NEW,
    "llama4": "it multiplies the expert inputs, not the outputs, by a score for every expert",
    "dbrx": "its router returns logits alone and the experts' module selects",
    "jetmoe": "its router also sorts tokens by expert, and routes attention heads",
    "switch_transformers": _CAPACITY,
    "nllb-moe": _CAPACITY,
    "zaya": "its router reads the previous layer's router state and has a skip expert",
    "gemma4": "its router owns a learned scale per expert and returns probabilities as logits",
}
