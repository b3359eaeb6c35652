"""Every field of torchtitan's Qwen3-MoE with another value: exported and equal, or refused.

    .engines/torchtitan/bin/python -m tests.engines.torchtitan.walk

prints the table of results/engines/torchtitan.md.
"""

import copy
import dataclasses
import warnings
from contextlib import contextmanager
from unittest import mock

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from l2r.errors import InputError
from l2r.report.tables import Table
from tests.engines.engines import SIPS

from .models import qwen3_configuration, scaled

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchtitan.config import Configurable
    from torchtitan.models.common import attention
    from torchtitan.models.common.attention import (
        FlexAttention,
        FusedQKVLinear,
        GQAttention,
        QKVLinear,
        VarlenAttention,
    )
    from torchtitan.models.common.config_utils import make_ffn_config
    from torchtitan.models.common.embedding import Embedding
    from torchtitan.models.common.feed_forward import SigmoidGatedFeedForward
    from torchtitan.models.common.linear import Linear, ScaledBiasRowwiseLinear
    from torchtitan.models.common.moe import (
        GroupedExperts,
        MoE,
        RoutedExperts,
        TokenChoiceTopKRouter,
    )
    from torchtitan.models.common.nn_modules import LayerNorm, RMSNorm
    from torchtitan.models.common.rope import ComplexRoPE, CosSinRoPE
    from torchtitan.models.common.token_dispatcher import (
        AllToAllTokenDispatcher,
        DeepEPTokenDispatcher,
        HybridEPTokenDispatcher,
        LocalTokenDispatcher,
        MinimalAsyncEPTokenDispatcher,
    )
    from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock

    from l2r.engines.torchtitan import L2RGate
    from l2r.engines.torchtitan.checkpoint import to_hugging_face
    from l2r.engines.torchtitan.fields import FIELDS, without_export

IDS = torch.randint(64, (2, 48), generator=torch.Generator().manual_seed(0))
NOT_HERE = "needs CUDA"  # its configuration is looked at, and no model built


def normal(weight):
    torch.nn.init.normal_(weight, std=0.02)


def linear(inside, outside, **fields):
    return Linear.Config(
        in_features=inside,
        out_features=outside,
        param_init={"weight": normal, "bias": torch.nn.init.ones_},
        **fields,
    )


def parts(config, kind):
    """Parts of a configuration that are of one class of modules, outermost first."""
    found = []
    if getattr(config, "_owner", None) is kind:
        found.append(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Configurable.Config):
                found += parts(each, kind)
    return found


def put(kind, field, value, where=None):
    """Set a field in every part of a class; value may be made from the part."""

    def change(config):
        for number, part in enumerate(parts(config, kind)):
            if where is None or number in where:
                setattr(part, field, value(part) if callable(value) else value)
        return config

    return change


def sizes(**arguments):
    """Another size, which changes several fields at once: the model has other tensors."""
    return lambda config: qwen3_configuration(SIPS, **arguments)


def dense_first(config):
    layer = config.layers[0]
    layer.moe = None
    start = {"weight": normal}
    layer.feed_forward = make_ffn_config(
        dim=32, hidden_dim=24, w1_param_init=start, w2w3_param_init=start
    )
    return config


def every(config, **values):
    for router in parts(config, TokenChoiceTopKRouter):
        for name, value in values.items():
            setattr(router, name, value)
    return config


def as_complex(part):
    return ComplexRoPE.Config(dim=part.rope.dim, max_seq_len=part.rope.max_seq_len)


def with_bias(inside, outside):
    """A bias in every Linear of these sizes, which name it."""

    def change(config):
        for part in parts(config, Linear):
            if (part.in_features, part.out_features) == (inside, outside):
                part.bias, part.param_init = True, {"weight": normal, "bias": torch.nn.init.ones_}
        return config

    return change


def masked(field, value):
    """The same in FlexAttention, which is compiled."""

    def change(config):
        del config
        made = qwen3_configuration(SIPS, flex=True)
        return put(FlexAttention, field, value)(made)

    return change


def dispatcher(kind, field=None):
    """Another dispatcher, and one of its fields with another value."""
    values = {"num_experts": 4, "top_k": 2}
    if field is not None and field not in values:
        values[field] = 7
    if field in ("num_experts", "top_k"):
        values[field] += 1
    return put(RoutedExperts, "token_dispatcher", lambda part: kind.Config(**values))


def dense_second(config):
    config.layers[1].moe = None
    config.layers[1].feed_forward = copy.deepcopy(config.layers[0].feed_forward)
    return config


def layer_norm(width=32):
    return LayerNorm.Config(
        normalized_shape=width,
        param_init={"weight": torch.nn.init.ones_, "bias": torch.nn.init.zeros_},
    )


def gated(config):
    plain = config.layers[0].feed_forward
    config.layers[0].feed_forward = SigmoidGatedFeedForward.Config(
        w1=plain.w1, w2=plain.w2, w3=plain.w3, gate=linear(32, 1)
    )
    return config


class Squared(GroupedExperts):
    """Experts of somebody else's."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """Nothing of its own."""

    def forward(self, x_RD, num_tokens_per_expert_E):
        return super().forward(x_RD, num_tokens_per_expert_E).square()


def other_experts(part):
    old = part.inner_experts
    values = {field.name: getattr(old, field.name) for field in dataclasses.fields(old)}
    return Squared.Config(**values)


NO_MATTER, OTHER_SIZES, MOVES = "no matter", "other tensors", "moves"
MASKED, RUNS_NOT = "no matter, with masks", "does not run"
SHARED = lambda part: make_ffn_config(  # noqa: E731
    dim=32, hidden_dim=16, w1_param_init={"weight": normal}, w2w3_param_init={"weight": normal}
)

# A class and a field: what is tried, in words, the change, and what it does to the engine's logits.
TRIED = {
    (Qwen3Model, "dim"): [("48", sizes(dim=48), OTHER_SIZES)],
    (Qwen3Model, "vocab_size"): [("80", sizes(vocabulary=80), OTHER_SIZES)],
    (Qwen3Model, "enable_weight_tying"): [("true", sizes(tied=True), MOVES)],
    (Qwen3Model, "layers"): [("3 of them", sizes(layers=3), OTHER_SIZES)],
    (Qwen3TransformerBlock, "feed_forward"): [
        ("dense first layer", dense_first, OTHER_SIZES),
        ("SigmoidGatedFeedForward", lambda c: gated(dense_first(c)), OTHER_SIZES),
    ],
    (Qwen3TransformerBlock, "moe"): [
        ("none anywhere", lambda c: dense_second(dense_first(c)), OTHER_SIZES)
    ],
    (Qwen3TransformerBlock, "attention_norm"): [
        (
            "LayerNorm",
            put(Qwen3TransformerBlock, "attention_norm", lambda part: layer_norm()),
            MOVES,
        )
    ],
    (Qwen3TransformerBlock, "ffn_norm"): [
        ("LayerNorm", put(Qwen3TransformerBlock, "ffn_norm", lambda part: layer_norm()), MOVES)
    ],
    (Qwen3Model, "norm"): [
        ("LayerNorm", put(Qwen3Model, "norm", lambda part: layer_norm()), MOVES)
    ],
    (GQAttention, "n_heads"): [("2", sizes(heads=2), OTHER_SIZES)],
    (GQAttention, "n_kv_heads"): [("1", sizes(kv_heads=1), OTHER_SIZES)],
    (GQAttention, "head_dim"): [("8", sizes(head_dim=8), OTHER_SIZES)],
    (GQAttention, "dim"): [("48", sizes(dim=48), OTHER_SIZES)],
    (GQAttention, "qkv_linear"): [("fused", sizes(fused=True), OTHER_SIZES)],
    (GQAttention, "qk_norm"): [
        ("none", put(GQAttention, "qk_norm", None), MOVES),
        ("LayerNorm", put(GQAttention, "qk_norm", lambda part: layer_norm(16)), MOVES),
    ],
    (GQAttention, "rope"): [("ComplexRoPE", put(GQAttention, "rope", as_complex), MOVES)],
    (GQAttention, "wo"): [
        (
            "ScaledBiasRowwiseLinear",
            put(
                GQAttention,
                "wo",
                lambda p: ScaledBiasRowwiseLinear.Config(
                    in_features=64,
                    out_features=32,
                    bias=True,
                    param_init={"weight": normal, "bias": torch.nn.init.ones_},
                ),
            ),
            MOVES,
        )
    ],
    (GQAttention, "inner_attention"): [("FlexAttention", sizes(flex=True), MASKED)],
    (QKVLinear, "head_dim"): [("8", sizes(head_dim=8), OTHER_SIZES)],
    (FusedQKVLinear, "head_dim"): [("8", sizes(head_dim=8, fused=True), OTHER_SIZES)],
    (FusedQKVLinear, "n_heads"): [("2", sizes(heads=2, fused=True), OTHER_SIZES)],
    (FusedQKVLinear, "n_kv_heads"): [("1", sizes(kv_heads=1, fused=True), OTHER_SIZES)],
    (FlexAttention, "block_size"): [("64", masked("block_size", 64), MASKED)],
    (FlexAttention, "kernel_options"): [
        ("an option", masked("kernel_options", {"PRESCALE_QK": True}), MASKED)
    ],
    (VarlenAttention, "window_size"): [
        (
            "(8, 0)",
            put(GQAttention, "inner_attention", VarlenAttention.Config(window_size=(8, 0))),
            NOT_HERE,
        )
    ],
    (CosSinRoPE, "dim"): [("12 of 16", put(CosSinRoPE, "dim", 12), RUNS_NOT)],
    (CosSinRoPE, "max_seq_len"): [("96", sizes(positions=96), NO_MATTER)],
    (CosSinRoPE, "theta"): [
        ("100", put(CosSinRoPE, "theta", 100.0), MOVES),
        ("100 in one layer", put(CosSinRoPE, "theta", 100.0, where={1}), MOVES),
    ],
    (CosSinRoPE, "scaling"): [
        (
            "yarn",
            lambda c: put(CosSinRoPE, "rope_factor", 8.0)(
                put(CosSinRoPE, "original_seq_len", 8)(put(CosSinRoPE, "scaling", "yarn")(c))
            ),
            MOVES,
        )
    ],
    **{
        (CosSinRoPE, name): [(str(value), put(CosSinRoPE, name, value), NO_MATTER)]
        for name, value in {
            "scaling_factor": 2.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 2.0,
            "original_max_position_embeddings": 8,
            "rope_factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 2.0,
            "original_seq_len": 8,
            "truncate": False,
        }.items()
    },
    (Linear, "in_features"): [("48", sizes(dim=48), OTHER_SIZES)],
    (Linear, "out_features"): [("2 heads", sizes(heads=2), OTHER_SIZES)],
    (Linear, "bias"): [
        ("queries", with_bias(32, 64), MOVES),
        ("keys and values", with_bias(32, 32), MOVES),
        ("attention's output", with_bias(64, 32), MOVES),
        ("head", with_bias(32, 72), MOVES),
    ],
    (Embedding, "num_embeddings"): [("80", sizes(vocabulary=80), OTHER_SIZES)],
    (Embedding, "embedding_dim"): [("48", sizes(dim=48), OTHER_SIZES)],
    (RMSNorm, "normalized_shape"): [("48", sizes(dim=48), OTHER_SIZES)],
    (RMSNorm, "eps"): [
        ("0.5 everywhere", put(RMSNorm, "eps", 0.5), MOVES),
        ("0.5 in one norm", put(RMSNorm, "eps", 0.5, where={0}), MOVES),
    ],
    (RMSNorm, "elementwise_affine"): [("false", put(RMSNorm, "elementwise_affine", False), MOVES)],
    (MoE, "num_experts"): [("6", sizes(experts=6), OTHER_SIZES)],
    (MoE, "load_balance_coeff"): [("none", put(MoE, "load_balance_coeff", None), MOVES)],
    (MoE, "shared_experts"): [("one", put(MoE, "shared_experts", SHARED), MOVES)],
    (GroupedExperts, "dim"): [("48", sizes(dim=48), OTHER_SIZES)],
    (GroupedExperts, "hidden_dim"): [("24", sizes(hidden=24), OTHER_SIZES)],
    (GroupedExperts, "num_experts"): [("6", sizes(experts=6), OTHER_SIZES)],
    (TokenChoiceTopKRouter, "num_experts"): [("6", sizes(experts=6), OTHER_SIZES)],
    (TokenChoiceTopKRouter, "top_k"): [("3", sizes(top_k=3), MOVES)],
    (TokenChoiceTopKRouter, "score_func"): [
        ("sigmoid", lambda c: every(c, score_func="sigmoid"), MOVES),
    ],
    (TokenChoiceTopKRouter, "route_norm"): [("false", lambda c: every(c, route_norm=False), MOVES)],
    (TokenChoiceTopKRouter, "route_scale"): [("2.5", lambda c: every(c, route_scale=2.5), MOVES)],
    (TokenChoiceTopKRouter, "num_expert_groups"): [
        ("2, one kept", lambda c: every(c, num_expert_groups=2, num_limited_groups=1), MOVES)
    ],
    (TokenChoiceTopKRouter, "num_limited_groups"): [
        ("1, without groups", lambda c: every(c, num_limited_groups=1), NO_MATTER)
    ],
    (TokenChoiceTopKRouter, "_debug_force_load_balance"): [
        ("true", lambda c: every(c, _debug_force_load_balance=True), MOVES)
    ],
    (L2RGate, "in_features"): [("48", sizes(dim=48), OTHER_SIZES)],
    (L2RGate, "out_features"): [("6", sizes(experts=6), OTHER_SIZES)],
    (L2RGate, "router"): [
        ("gamma 3", put(L2RGate, "router", {**SIPS, "gamma": 3.0}), MOVES),
        ("temperature 0.3", put(L2RGate, "router", {**SIPS, "temperature": 0.3}), MOVES),
        ("linear", put(L2RGate, "router", {"kind": "linear"}), OTHER_SIZES),
        ("another in one layer", put(L2RGate, "router", {**SIPS, "gamma": 3.0}, {0}), MOVES),
    ],
    (RoutedExperts, "token_dispatcher"): [
        ("local", dispatcher(LocalTokenDispatcher), NO_MATTER),
        ("DeepEP", dispatcher(DeepEPTokenDispatcher), NOT_HERE),
        ("HybridEP", dispatcher(HybridEPTokenDispatcher), NOT_HERE),
        ("MinimalAsyncEP", dispatcher(MinimalAsyncEPTokenDispatcher), NOT_HERE),
    ],
    (RoutedExperts, "inner_experts"): [
        ("a subclass", put(RoutedExperts, "inner_experts", other_experts), MOVES)
    ],
}
for kind in (
    LocalTokenDispatcher,
    AllToAllTokenDispatcher,
    DeepEPTokenDispatcher,
    MinimalAsyncEPTokenDispatcher,
):
    for each in dataclasses.fields(kind.Config):
        TRIED[kind, each.name] = [("another", dispatcher(kind, each.name), NOT_HERE)]


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of one value of a field; difference and moved are shares of the largest logit."""

    owner: str
    field: str
    value: str
    effect: str
    moved: float | None
    difference: float | None
    refused: str


@torch.no_grad()
def logits(model, ids=IDS, *, masks=False):
    """Logits with experts in the dtype of their weights."""
    places = torch.arange(ids.shape[1]).expand_as(ids)
    with mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor):
        return model(ids, places, model.get_attention_masks(places) if masks else None)


def tried(key, value, change, effect):
    """A row: the engine's logits before and after the change, and the export's."""
    kind, field = key
    names = kind.__name__, field, value, effect
    with uncompiled():
        return _tried(names, change, effect)


@contextmanager
def uncompiled():
    """FlexAttention and its masks without a compiler, which tunes for minutes."""
    with (
        mock.patch.object(FlexAttention, "_compiled_flex_attn", flex_attention),
        mock.patch.object(attention, "_compiled_create_block_mask", create_block_mask),
    ):
        yield


def _tried(names, change, effect):
    config = change(qwen3_configuration(SIPS))
    if effect == NOT_HERE:
        return Row(*names, None, None, "; ".join(without_export(config)))
    try:
        model = scaled(config)
        here = logits(model, IDS % config.vocab_size, masks=effect == MASKED)
    except Exception as error:
        assert effect == RUNS_NOT, (names, error)
        model = scaled(qwen3_configuration(SIPS))
        model.config, here = config, None
    moved = None
    if effect in (MOVES, NO_MATTER, MASKED):
        base = logits(scaled(qwen3_configuration(SIPS)))
        moved = float((here - base).abs().max() / base.abs().max())
    try:
        made = to_hugging_face(model, max_position_embeddings=config.max_seq_len)
    except InputError as error:
        return Row(*names, moved, None, str(error))
    with torch.no_grad():
        there = made(IDS % config.vocab_size).logits
    return Row(*names, moved, float((there - here).abs().max() / here.abs().max()), "")


def all_fields():
    """Every class of a configuration that has an export, and each of its fields that is no part."""
    for kind in FIELDS:
        for field in dataclasses.fields(kind.Config):
            if field.name not in ("param_init", "sharding_config"):
                yield kind, field.name


def rows():
    return [tried(key, *case) for key, cases in TRIED.items() for case in cases]


def table(found):
    """The table of results/engines/torchtitan.md."""
    lines = []
    for row in found:
        moved = "" if row.moved is None else f"{row.moved:.0%}"
        end = row.refused or (row.effect if row.difference is None else f"{row.difference:.1e}")
        lines.append((f"{row.owner}.{row.field}", row.value, moved, end))
    columns = ("field", "value", "moves logits by", "export differs by, or is refused")
    return Table("Fields", columns, tuple(lines)).to_markdown()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(table(rows()))
