"""Fields of torchtitan's Qwen3-MoE for Hugging Face's: mapped, without effect, or refused.

A class or a field that is not here, of a newer torchtitan too, is refused unless the field has its
default.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from l2r.engines.engine import require
from l2r.engines.torchtitan import L2RGate
from l2r.errors import InputError
from l2r.routers.selection_rule import Selection

require("torchtitan")

from torchtitan.models.common import attention, moe, token_dispatcher  # noqa: E402
from torchtitan.models.common.embedding import Embedding  # noqa: E402
from torchtitan.models.common.feed_forward import FeedForward  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.models.common.nn_modules import RMSNorm  # noqa: E402
from torchtitan.models.common.rope import CosSinRoPE  # noqa: E402
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock  # noqa: E402

MAPPED = "mapped"
_START, _PLACES = "the start alone", "where tensors are"
_SPEED, _OFF = "speed alone", "of a scaling, which must be none"
_EVERYWHERE = {"param_init": _START, "sharding_config": _PLACES}
_PARTS: Mapping[str, tuple[type, ...]] = {  # classes that a part may have, by its name
    "attention": (attention.GQAttention,),
    "qkv_linear": (attention.QKVLinear, attention.FusedQKVLinear),
    "inner_attention": (
        attention.FlexAttention,
        attention.VarlenAttention,
        attention.ScaledDotProductAttention,
    ),
    "rope": (CosSinRoPE,),
    "token_dispatcher": (
        token_dispatcher.LocalTokenDispatcher,
        token_dispatcher.AllToAllTokenDispatcher,
        token_dispatcher.DeepEPTokenDispatcher,
        token_dispatcher.MinimalAsyncEPTokenDispatcher,
    ),
    "gate": (L2RGate,),
    **dict.fromkeys(("lm_head", "wo", "wq", "wkv", "wqkv", "w1", "w2", "w3"), (Linear,)),
    **dict.fromkeys(("norm", "qk_norm", "attention_norm", "ffn_norm"), (RMSNorm,)),
    "tok_embeddings": (Embedding,),
    "layers": (Qwen3TransformerBlock,),
    "feed_forward": (FeedForward,),
    "moe": (moe.MoE,),
    "router": (moe.TokenChoiceTopKRouter,),
    "routed_experts": (moe.RoutedExperts,),
    "inner_experts": (moe.GroupedExperts,),
}
_SCALING = (
    "scaling_factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    "rope_factor", "beta_fast", "beta_slow", "original_seq_len", "truncate",
)  # fmt: skip
# Fields that are no part, by class: what they are. Of others the default alone is allowed.
FIELDS: Mapping[type, Mapping[str, str]] = {
    Qwen3Model: dict.fromkeys(("dim", "vocab_size", "enable_weight_tying"), MAPPED),
    Qwen3TransformerBlock: {},
    attention.GQAttention: dict.fromkeys(("n_heads", "n_kv_heads", "head_dim", "dim"), MAPPED),
    attention.QKVLinear: {"head_dim": MAPPED},
    attention.FusedQKVLinear: dict.fromkeys(("head_dim", "n_heads", "n_kv_heads"), MAPPED),
    attention.FlexAttention: {"block_size": _SPEED, "kernel_options": _SPEED},
    attention.VarlenAttention: {},
    attention.ScaledDotProductAttention: {},
    CosSinRoPE: dict.fromkeys(("dim", "max_seq_len", "theta"), MAPPED)
    | dict.fromkeys(_SCALING, _OFF),
    Linear: dict.fromkeys(("in_features", "out_features"), MAPPED),
    Embedding: dict.fromkeys(("num_embeddings", "embedding_dim"), MAPPED),
    RMSNorm: dict.fromkeys(("normalized_shape", "eps"), MAPPED),
    FeedForward: {},
    moe.MoE: dict.fromkeys(("num_experts", "load_balance_coeff"), MAPPED),
    moe.RoutedExperts: {},
    moe.GroupedExperts: dict.fromkeys(("dim", "hidden_dim", "num_experts"), MAPPED),
    moe.TokenChoiceTopKRouter: {
        **dict.fromkeys(("num_experts", "top_k", "score_func", "route_norm"), MAPPED),
        "route_scale": MAPPED,
        "num_limited_groups": "of groups, of which there must be none",
    },
    L2RGate: dict.fromkeys(("in_features", "out_features", "router"), MAPPED),
    token_dispatcher.LocalTokenDispatcher: dict.fromkeys(("num_experts", "top_k"), MAPPED),
    token_dispatcher.AllToAllTokenDispatcher: dict.fromkeys(("num_experts", "top_k"), MAPPED),
    token_dispatcher.DeepEPTokenDispatcher: {
        **dict.fromkeys(("num_experts", "top_k"), MAPPED),
        **dict.fromkeys(("cudagraphable", "num_max_tokens_per_rank", "hidden_dim"), _SPEED),
    },
    token_dispatcher.MinimalAsyncEPTokenDispatcher: {
        **dict.fromkeys(("num_experts", "top_k"), MAPPED),
        **dict.fromkeys(("hidden_dim", "num_max_tokens_per_rank", "dtype", "device"), _SPEED),
    },
}
_OWN = (Qwen3Model,)


def without_export(config: Any) -> list[str]:
    """Return a line for each setting of a configuration that Hugging Face's Qwen3-MoE lacks.

    Empty where ``settings`` gives the Hugging Face model.
    """
    lines = list(dict.fromkeys(_refused(config, "", _OWN)))
    if not lines:
        try:
            settings(config)
        except InputError as error:
            lines = [str(error)]
    return lines


def _refused(config: Any, path: str, kinds: tuple[type, ...]) -> Iterator[str]:
    owner = _owner(config)
    kind = next((k for k in kinds if owner is k or (k in _OWN and issubclass(owner, k))), None)
    name = path or "the model"
    if kind is None:
        names = " or ".join(k.__qualname__ for k in kinds)
        yield f"{name} must be a {names}; got {owner.__qualname__}"
        return
    known = {**_EVERYWHERE, **FIELDS[kind]}
    for field in dataclasses.fields(config):
        value, there = getattr(config, field.name), f"{path}.{field.name}".lstrip(".")
        if field.name in known:
            continue
        if field.name == "layers":
            for layer in value:
                yield from _refused(layer, "layers.*", _PARTS["layers"])
        elif field.name in _PARTS and value is not None:
            yield from _refused(value, there, _PARTS[field.name])
        elif field.name not in _PARTS:
            usual = _default(field)
            if usual is dataclasses.MISSING:
                yield f"{there} is unknown, and its value is part of the model; got {value}"
            elif value != usual:
                made = getattr(value, "_owner", None)
                yield f"{there} must be {usual}; got {made.__qualname__ if made else value}"


def _default(field: Any) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _owner(config: Any) -> type:
    owner: type = getattr(config, "_owner", None) or type(config)
    return owner


def settings(config: Any) -> dict[str, Any]:
    """Fields of a Qwen3MoeConfig for a model's configuration.

    Raises InputError for what Qwen3-MoE has once and the configuration in two ways, and for what
    it cannot do without.
    """
    layers = config.layers
    sparse = [layer for layer in layers if layer.moe is not None]
    if not sparse:
        raise InputError("layers must have a moe somewhere to be a Qwen3-MoE; got none")
    blocks = [layer.attention for layer in layers]
    if any(block.qk_norm is None for block in blocks):
        raise InputError("layers.*.attention.qk_norm must be a norm, as Qwen3 has; got None")
    ropes = [block.rope for block in blocks]
    heads = _one("layers.*.attention.n_heads", [block.n_heads for block in blocks])
    head_dim = _one(
        "layers.*.attention.head_dim",
        [config.dim // b.n_heads if b.head_dim is None else b.head_dim for b in blocks],
    )
    if _one("layers.*.attention.rope.dim", [rope.dim for rope in ropes]) != head_dim:
        raise InputError(
            f"layers.*.attention.rope.dim must be head_dim={head_dim}; got {ropes[0].dim}"
        )
    norms = [config.norm]
    for layer in layers:
        norms += [layer.attention_norm, layer.ffn_norm, layer.attention.qk_norm]
    dense = [n for n, layer in enumerate(layers) if layer.moe is None]
    widths = [layers[n].feed_forward.w1.out_features for n in dense]
    experts = [layer.moe.routed_experts.inner_experts for layer in sparse]
    routers = [layer.moe.router for layer in sparse]
    hidden = _one(
        "layers.*.moe.routed_experts.inner_experts.hidden_dim", [e.hidden_dim for e in experts]
    )
    top_k = _one("layers.*.moe.router.top_k", [router.top_k for router in routers])
    sent = [layer.moe.routed_experts.token_dispatcher for layer in sparse]
    for name, wanted in (("top_k", top_k), ("num_experts", routers[0].num_experts)):
        for part in sent:
            if getattr(part, name) != wanted:
                raise InputError(
                    f"layers.*.moe.routed_experts.token_dispatcher.{name} must be the router's "
                    f"{wanted}; got {getattr(part, name)}"
                )
    for name in ("num_experts", "score_func", "route_norm", "route_scale"):
        _one(f"layers.*.moe.router.{name}", [getattr(router, name) for router in routers])
    _one("layers.*.moe.router.gate.router", [router.gate.router for router in routers])
    _one(
        "moe.load_balance_coeff is None", [layer.moe.load_balance_coeff is None for layer in sparse]
    )
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": len(layers),
        "num_attention_heads": heads,
        "num_key_value_heads": _one(
            "layers.*.attention.n_kv_heads",
            [b.n_heads if b.n_kv_heads is None else b.n_kv_heads for b in blocks],
        ),
        "head_dim": head_dim,
        "rms_norm_eps": _one("eps of every norm", [norm.eps for norm in norms]),
        "max_position_embeddings": min(rope.max_seq_len for rope in ropes),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(_one("layers.*.attention.rope.theta", [r.theta for r in ropes])),
        },
        "tie_word_embeddings": config.enable_weight_tying,
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
        "intermediate_size": _one("layers.*.feed_forward.w1.out_features", widths or [hidden]),
        "moe_intermediate_size": hidden,
        "num_experts": routers[0].num_experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": routers[0].route_norm,
    }


def rule(config: Any) -> Selection:
    """Return how the engine chooses and weighs experts, the same in every layer."""
    layer = next(layer for layer in config.layers if layer.moe is not None)
    router = layer.moe.router
    return Selection(
        gate=router.score_func,
        normalize=router.route_norm,
        scale=router.route_scale,
        bias=None if layer.moe.load_balance_coeff is None else "expert_bias_E",
    )


def _one(name: str, values: list[Any]) -> Any:
    for value in values:
        if value != values[0]:
            raise InputError(
                f"{name} must be the same everywhere to be a Qwen3-MoE; got {values[0]} and {value}"
            )
    return values[0]
