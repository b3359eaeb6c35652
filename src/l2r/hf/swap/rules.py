"""Selection rules by family: each reads a router's settings and gives a selection.

A rule knows no class: it reads attributes, so that it can be tried on any router that has them
(AttributeError where one is missing).

Shape letters: T tokens, N experts, K experts chosen per token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.routers.selection_rule import Selection


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


@dataclass(frozen=True, kw_only=True, repr=False)
class TokenTable(Selection):
    """DeepSeek-V4's hash layers: experts by a table of token ids, weighed by the gate."""

    by_token: ClassVar[bool] = True

    def __call__(
        self, router: nn.Module, logits: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        raise InputError(f"{type(router).__name__} chooses experts by token ids, not by logits")

    def ranking(self, router: nn.Module, logits: Tensor) -> Tensor:
        raise InputError(f"{type(router).__name__} chooses by token ids: there is no margin")


@dataclass(frozen=True, kw_only=True, repr=False)
class Unmatched(Selection):
    """The rule of a router that no rule of the table reproduces: it is seen, and no more.

    reason: what differs, in words.
    """

    reason: str

    def __call__(
        self, router: nn.Module, logits: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        raise InputError(self.reason)

    def weigh(self, router: nn.Module, logits: Tensor, indices: Tensor) -> Tensor:
        raise InputError(self.reason)

    def ranking(self, router: nn.Module, logits: Tensor) -> Tensor:
        raise InputError(self.reason)


def normalized_by_flag(old: Any) -> Selection:
    """Softmax over all experts, top-k, weights as they are or renormalized by a flag."""
    return Selection(normalize=getattr(old, "norm_topk_prob", False))


def deepseek_v2(old: Any) -> Selection:
    limited = old.topk_method == "group_limited_greedy"
    return Selection(
        scale=old.routed_scaling_factor,
        groups=old.num_group if limited else 1,
        kept_groups=old.topk_group if limited else 1,
        group_best=1,
    )


def cohere2(old: Any) -> Selection:
    if old.expert_selection_fn == "softmax":
        return Selection(normalize=True)
    return Selection(gate="sigmoid", normalize=old.norm_topk_prob)


def phimoe(old: Any) -> Selection:
    return SparseMixer(jitter=old.router_jitter_noise)


def axk2(old: Any) -> Selection:
    """DeepSeek-V3's, in groups or without; experts of dropped groups count as 0."""
    if old.num_group is not None:
        return replace(deepseek_v3(old), dropped=0.0)
    return _rule(_SCALED, **_SIGMOID)(old)


def deepseek_v4(old: Any) -> Selection:
    return Selection(**_by_name(old), bias=_BIAS)


def deepseek_v4_hash(old: Any) -> Selection:
    return TokenTable(**_by_name(old))


def openai_privacy_filter(old: Any) -> Selection:
    """gpt-oss's; the block multiplies what the division by k takes away."""
    return Selection(normalize=True, scale=1 / old.top_k)


def _rule(read: Mapping[str, str], **fixed: Any) -> Callable[[Any], Selection]:
    """Make a rule from fixed fields of a selection and fields read from the old router."""
    return lambda old: Selection(**fixed, **{f: getattr(old, name) for f, name in read.items()})


def _by_name(old: Any) -> dict[str, Any]:
    """Gate by the activation's class, normalized and scaled. Raises ValueError for another gate."""
    name = type(old.score_fn).__name__
    gates = {"Sigmoid": "sigmoid", "SqrtSoftplusActivation": "sqrtsoftplus"}
    if name not in gates:
        raise InputError(
            f"scoring_func of {type(old).__name__} must be sigmoid or sqrtsoftplus; got {name}"
        )
    scale = old.routed_scaling_factor
    return {"gate": gates[name], "normalize": True, "norm_eps": 1e-20, "scale": scale}


# transformers' Mixtral and its like renormalize whatever their configuration says. So do families
# whose softmax is over the k chosen logits only: the same weights.
always_normalized = _rule({}, normalize=True)
ernie = _rule({"norm_min": "norm_min"}, normalize=True, bias="moe_statics.e_score_correction_bias")
_BIAS = "e_score_correction_bias"
_FLAG = {"normalize": "norm_topk_prob"}
_SCALED = {**_FLAG, "scale": "routed_scaling_factor"}
_GROUPS = {"groups": "num_group", "kept_groups": "topk_group"}
_SIGMOID: dict[str, Any] = {"gate": "sigmoid", "norm_eps": 1e-20, "bias": _BIAS}
deepseek_v3 = _rule({**_SCALED, **_GROUPS}, **_SIGMOID)
# The block scales.
beam = _rule({**_FLAG, **_GROUPS}, **_SIGMOID)
laguna = _rule({}, gate="sigmoid", normalize=True, bias=_BIAS)
muse_spark = _rule(
    {"scale": "routed_scaling_factor", "norm_eps": "norm_topk_prob_eps"},
    gate="sigmoid",
    normalize=True,
    bias=_BIAS,
)
kolibri1 = _rule(_FLAG, gate="sigmoid", bias=_BIAS, biased="logits")
flint = _rule(_FLAG, gate="sigmoid")
# Probabilities are above 0, so that experts of dropped groups, which count as 0, are never chosen.
mistral4 = _rule({**_SCALED, **_GROUPS}, norm_eps=1e-20)
mistral_large4 = _rule(
    {"scale": "routed_scaling_factor", **_GROUPS}, normalize=True, norm_eps=1e-20
)
longcat_flash = _rule({"scale": "routed_scaling_factor"}, bias=_BIAS)
# From here on the selection bias belongs to the block and comes with each call.
_BLOCK: dict[str, Any] = {"gate": "sigmoid", "block_bias": True}
minimax_m2 = _rule({}, **_BLOCK, normalize=True)
lfm2 = _rule(_SCALED, **_BLOCK, norm_eps=1e-6)
afmoe = _rule({"scale": "route_scale"}, **_BLOCK, normalize=True, norm_eps=1e-20)
hy_v3 = _rule({"scale": "router_scaling_factor"}, **_BLOCK, normalize=True, norm_eps=1e-20)
