"""Model families whose routers can be replaced, and the selection each one keeps.

A family is recognized by the class name of its router, so that models built around the same
decoder (vision-language models, classifiers) are recognized too. Every router here returns
(logits [T, N], weights [T, K], indices [T, K]); selections are read from the router being replaced.

A new family is a line of _TABLE and its tiny sizes in tests/hf/families.py, whose tests then run
for it; scripts/pages/families_page.py writes it into docs/swap.md.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from l2r.routers.selection_rule import Selection


@dataclass(frozen=True)
class Family:
    """A model family, by transformers' model type and the class name of its router.

    rule: function from an old router to its selection. weight: path of the router's [N, D] matrix.
    """

    model_type: str
    router: str
    rule: Callable[[Any], Selection]
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


def _normalized_by_flag(old: Any) -> Selection:
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
    return Selection(gate="sigmoid", normalize=old.norm_topk_prob)


def _phimoe(old: Any) -> Selection:
    return SparseMixer(jitter=old.router_jitter_noise)


def _rule(read: Mapping[str, str], **fixed: Any) -> Callable[[Any], Selection]:
    """Fixed fields of a selection, and fields that are read from attributes of the old router."""
    return lambda old: Selection(**fixed, **{f: getattr(old, name) for f, name in read.items()})


# transformers' Mixtral and its like renormalize whatever their configuration says. So do families
# whose softmax is over the k chosen logits only: the same weights.
_always_normalized = _rule({}, normalize=True)
# The original bounds the sum from below by the same constant instead of adding it.
_ernie = _rule({"norm_eps": "norm_min"}, normalize=True, bias="moe_statics.e_score_correction_bias")
_SCALED = {"normalize": "norm_topk_prob", "scale": "routed_scaling_factor"}
_V3 = _rule(
    {**_SCALED, "groups": "num_group", "kept_groups": "topk_group"},
    gate="sigmoid",
    norm_eps=1e-20,
    bias="e_score_correction_bias",
)
_laguna = _rule({}, gate="sigmoid", normalize=True, bias="e_score_correction_bias")
# From here on the selection bias belongs to the block and comes with each call.
_BLOCK: dict[str, Any] = {"gate": "sigmoid", "block_bias": True}
_minimax_m2 = _rule({}, **_BLOCK, normalize=True)
_lfm2 = _rule(_SCALED, **_BLOCK, norm_eps=1e-6)
_afmoe = _rule({"scale": "route_scale"}, **_BLOCK, normalize=True, norm_eps=1e-20)
_hy_v3 = _rule({"scale": "router_scaling_factor"}, **_BLOCK, normalize=True, norm_eps=1e-20)

_TABLE = (
    Family("olmoe", "OlmoeTopKRouter", _normalized_by_flag),
    Family("flex_olmo", "FlexOlmoTopKRouter", _normalized_by_flag),
    Family("qwen2_moe", "Qwen2MoeTopKRouter", _normalized_by_flag),
    Family("qwen3_moe", "Qwen3MoeTopKRouter", _normalized_by_flag),
    Family("qwen3_next", "Qwen3NextTopKRouter", _normalized_by_flag),
    Family("mellum", "MellumTopKRouter", _normalized_by_flag),
    Family("jamba", "JambaTopKRouter", _normalized_by_flag),
    Family("mixtral", "MixtralTopKRouter", _always_normalized),
    Family("minimax", "MiniMaxTopKRouter", _always_normalized),
    Family("qwen3_5_moe_text", "Qwen3_5MoeTopKRouter", _always_normalized),
    Family("hunyuan_v1_moe", "HunYuanMoEV1Gate", _always_normalized, weight="wg.weight"),
    Family("gpt_oss", "GptOssTopKRouter", _always_normalized),
    Family("granitemoe", "GraniteMoeTopKRouter", _always_normalized),
    Family("granitemoeshared", "GraniteMoeSharedTopKRouter", _always_normalized),
    Family("granitemoehybrid", "GraniteMoeHybridTopKRouter", _always_normalized),
    Family("cohere2_moe", "Cohere2MoeTopKRouter", _cohere2),
    Family("phimoe", "PhimoeTopKRouter", _phimoe),
    Family("ernie4_5_moe", "Ernie4_5_MoeTopKRouter", _ernie),
    Family("deepseek_v2", "DeepseekV2TopkRouter", _deepseek_v2),
    Family("deepseek_v3", "DeepseekV3TopkRouter", _V3),
    Family("deepseek_v32", "DeepseekV32TopkRouter", _V3),
    Family("glm4_moe", "Glm4MoeTopkRouter", _V3),
    Family("glm4_moe_lite", "Glm4MoeLiteTopkRouter", _V3),
    Family("dots1", "Dots1TopkRouter", _V3),
    Family("solar_open", "SolarOpenTopkRouter", _V3),
    Family("exaone_moe", "ExaoneMoeTopkRouter", _V3),
    Family("nemotron_h", "NemotronHTopkRouter", _V3),
    Family("laguna", "LagunaTopKRouter", _laguna),
    Family("minimax_m2", "MiniMaxM2TopKRouter", _minimax_m2),
    Family("lfm2_moe", "Lfm2MoeTopKRouter", _lfm2),
    Family("afmoe", "AfmoeTokenChoiceRouter", _afmoe, weight="gate.weight"),
    Family("hy_v3", "HYV3TopKRouter", _hy_v3),
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
FAMILY_OF_ROUTER: Mapping[str, Family] = {family.router: family for family in FAMILIES.values()}

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
