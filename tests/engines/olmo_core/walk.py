"""Every field of OLMo-core's configurations, and every argument of its modules, with other values.

    .engines/olmo-core/bin/python -m tests.engines.olmo_core.walk   # the table

Weights are those of the same small model throughout, large enough for attention and experts to
matter in its logits: freshly drawn ones hide everything.
"""

import dataclasses
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from tests.engines.engines import walk_table

from .models import EXPERTS, TOP_K, VOCABULARY, configuration, on_cpu

from olmo_core.config import DType  # isort: skip
from olmo_core.nn import attention as mixers  # isort: skip
from olmo_core.nn import layer_norm as norms  # isort: skip
from olmo_core.nn import lm_head as heads  # isort: skip
from olmo_core.nn import rope as ropes  # isort: skip
from olmo_core.nn.feed_forward import FeedForwardConfig  # isort: skip
from olmo_core.nn.moe import mlp, moe, router  # isort: skip
from olmo_core.nn.moe.loss import MoELoadBalancingLossGranularity  # isort: skip
from olmo_core.nn.transformer import block as blocks  # isort: skip
from olmo_core.nn.transformer import config as models  # isort: skip
from olmo_core.nn.transformer.init import InitMethod  # isort: skip
from olmo_core.nn.transformer.model import MoETransformer  # isort: skip

from l2r.engines.olmo_core import L2RMoERouter, L2RRouterConfig  # isort: skip
from l2r.engines.olmo_core.checkpoint import to_hugging_face  # isort: skip

LENGTH = 64
Change = Callable[[Any], None]


@dataclass(frozen=True)
class Row:
    """One setting: what it did to the engine's logits, and what became of the export.

    moved: largest change of a logit over the largest, None where the shape is another or nothing
    ran. outcome: equal, refused, or engine where OLMo-core itself has no such model on a CPU.
    difference: of the folder's logits, over the largest, None below fp32, where the export compares
    with the engine's routes and by its rounding. said: the line of a refusal.
    """

    of: str
    field: str
    value: str
    moved: float | None
    outcome: str
    difference: float | None = None
    said: str = ""


def _block(c: Any) -> Any:
    return c.block


def _attention(c: Any) -> Any:
    return c.block.sequence_mixer


def _moe(c: Any) -> Any:
    return c.block.feed_forward_moe


# Where a configuration of each class stands in that of the model.
PLACES: dict[type, Callable[[Any], Any]] = {
    models.TransformerConfig: lambda c: c,
    models.TransformerBlockConfig: _block,
    mixers.AttentionConfig: _attention,
    ropes.RoPEConfig: lambda c: _attention(c).rope,
    norms.LayerNormConfig: lambda c: _block(c).layer_norm,
    moe.MoEConfig: _moe,
    L2RRouterConfig: lambda c: _moe(c).router,
    heads.LMHeadConfig: lambda c: c.lm_head,
}
# Norms that are fields of other configurations, apart from that of the block.
NORMS = {
    "qk_norm": lambda c: _attention(c).qk_norm,
    "lm_head.layer_norm": lambda c: c.lm_head.layer_norm,
}


class Other:
    """A value that is put in by a function of the model's configuration."""

    def __init__(self, name: str, put: Change) -> None:
        self.name, self.put = name, put

    def __str__(self) -> str:
        return self.name


def _named_blocks(c: Any) -> None:
    c.block = {"a": c.block, "b": c.block.copy()}
    c.block_pattern = ["a", "b"]


def _other_named_blocks(c: Any) -> None:
    _named_blocks(c)
    mixer = c.block["b"].sequence_mixer.copy()
    mixer.clip_qkv = 0.3
    c.block["b"].sequence_mixer = mixer


def _override(change: Change) -> Change:
    def put(c: Any) -> None:
        block = c.block.copy()
        block.sequence_mixer = block.sequence_mixer.copy()
        block.feed_forward_moe = block.feed_forward_moe.copy()
        block.layer_norm = block.layer_norm.copy()
        change(block)
        c.block_overrides = {1: block}

    return put


def _set(name: str, value: Any) -> Change:
    return lambda owner: setattr(owner, name, value)


def _dense(block: Any) -> None:
    block.name, block.feed_forward_moe = models.TransformerBlockType.default, None
    block.feed_forward = FeedForwardConfig(hidden_size=16, bias=False)


def _sliding(**fields: Any) -> mixers.SlidingWindowAttentionConfig:
    return mixers.SlidingWindowAttentionConfig(pattern=[4], **fields)


def _half(c: Any) -> None:
    for owner in (c, _attention(c), _moe(c), c.lm_head, *(place(c) for place in NORMS.values())):
        owner.dtype = DType.bfloat16
    c.block.layer_norm.dtype = DType.bfloat16


def _hybrid(name: str) -> Other:
    def put(c: Any) -> None:
        c.block.name = name
        c.block.feed_forward = FeedForwardConfig(hidden_size=16, bias=False)

    return Other(f"{name}, feed_forward=FeedForwardConfig", put)


_FLAT = {"force_full_attention_on_first_layer": False, "force_full_attention_on_last_layer": False}
_HALF = [DType.bfloat16]
_RMS = norms.LayerNormConfig(name=norms.LayerNormType.rms, bias=False, eps=1e-5)

# Other values of every field. Those of a list are tried one by one.
VALUES: dict[type, dict[str, list[Any]]] = {
    models.TransformerConfig: {
        "d_model": [64],
        "vocab_size": [80],
        "n_layers": [3],
        "block": [Other("two alike", _named_blocks), Other("two that differ", _other_named_blocks)],
        "lm_head": [Other("without layer_norm", lambda c: setattr(c.lm_head, "layer_norm", None))],
        "embedding_norm": [_RMS],
        "name": [*models.TransformerType],
        "dtype": [*_HALF, Other("bfloat16 everywhere", _half)],
        "init_method": [*InitMethod],
        "init_seed": [5],
        "init_std": [0.1],
        "embedding_init_std": [0.5],
        "freeze_params": [["*"]],
        "block_pattern": [["a"], Other("of alike blocks", _named_blocks)],
        "block_overrides": [
            Other("alike", _override(lambda block: None)),
            Other("a clip", _override(lambda b: setattr(b.sequence_mixer, "clip_qkv", 0.3))),
            Other("an eps", _override(lambda b: setattr(b.layer_norm, "eps", 1.0))),
            Other("a dense block", _override(_dense)),
            Other(
                "other norms",
                _override(_set("name", models.TransformerBlockType.moe_reordered_norm)),
            ),
            Other(
                "a window",
                _override(lambda b: setattr(b.sequence_mixer, "sliding_window", _sliding(**_FLAT))),
            ),
        ],
        "embed_scale": [4.0],
        "tie_word_embeddings": [True],
    },
    models.TransformerBlockConfig: {
        "sequence_mixer": [],  # mixers.AttentionConfig
        "layer_norm": [None],  # else norms.LayerNormConfig
        "feed_forward": [FeedForwardConfig(hidden_size=16, bias=False)],
        "feed_forward_moe": [None],  # else moe.MoEConfig
        "name": [
            *models.TransformerBlockType,
            _hybrid(models.TransformerBlockType.moe_hybrid),
            _hybrid(models.TransformerBlockType.moe_hybrid_reordered_norm),
        ],
        "dropout": [0.3],
        "attention_residual_alpha": [0.5],
        "feed_forward_residual_alpha": [0.5],
    },
    mixers.AttentionConfig: {
        "name": [*mixers.AttentionType],
        "n_heads": [4],
        "n_kv_heads": [1],
        "head_dim": [8, 16],
        "bias": [True],
        "gate": [
            mixers.GateConfig(),
            mixers.GateConfig(granularity=mixers.GateGranularity.elementwise),
        ],
        "rope": [None],  # else ropes.RoPEConfig
        "clip_qkv": [0.3],
        "qk_norm": [None],  # else norms.LayerNormConfig
        "dropout": [0.3],
        "use_flash": [True],
        "backend": [*mixers.AttentionBackendName],
        "dtype": _HALF,
        "sliding_window": [
            _sliding(**_FLAT),
            _sliding(force_full_attention_on_last_layer=False),
            mixers.SlidingWindowAttentionConfig(pattern=[-1], **_FLAT),
        ],
        "use_head_qk_norm": [True],
        "scalable_softmax": [True],
        "qk_norm_per_head_gains": [
            Other(
                "True, use_head_qk_norm=True",
                lambda c: vars(_attention(c)).update(
                    use_head_qk_norm=True, qk_norm_per_head_gains=True
                ),
            )
        ],
        "attention_sinks": [True],
        "mxfp8_projections": [True],
        "mxfp8_qkv_projection": [True],
        "mxfp8_out_projection": [True],
        "use_recompute_qkv_prep": [True],
        "mxfp8_save_qkv_for_backward": [True],
    },
    ropes.RoPEConfig: {
        "name": [*ropes.RoPEType],
        "theta": [100],
        "full_precision": [False],
        "no_global_rope": [True],
        "scaling": [
            ropes.ABFRoPEScalingConfig(new_theta=100),
            ropes.ABFRoPEScalingConfig(new_theta=100, attention_rescale_factor=1.3),
            ropes.PIRoPEScalingConfig(factor=3.0),
            ropes.PIRoPEScalingConfig(factor=3.0, attention_rescale_factor=1.3),
            ropes.StepwiseRoPEScalingConfig(factor=4.0, old_context_len=16),
            ropes.StepwiseRoPEScalingConfig(
                factor=4.0, old_context_len=16, low_freq_proportion=0.3
            ),
            ropes.StepwiseRoPEScalingConfig(
                factor=4.0, old_context_len=16, high_freq_proportion=0.5
            ),
            ropes.StepwiseRoPEScalingConfig(old_context_len=16, attention_rescale_factor=1.3),
            ropes.YaRNRoPEScalingConfig(factor=4.0, old_context_len=16),
            ropes.YaRNRoPEScalingConfig(factor=4.0, old_context_len=16, beta_fast=4, beta_slow=2),
        ],
        "partial_rotary_factor": [0.5],
    },
    norms.LayerNormConfig: {
        "name": [*norms.LayerNormType],
        "eps": [1.0],
        "elementwise_affine": [False],
        "bias": [True],
        "full_precision": [False],
        "dtype": _HALF,
    },
    moe.MoEConfig: {
        "name": [moe.MoEType.default],
        "num_experts": [8],
        "hidden_size": [32],
        "capacity_factor": [
            Other(
                f"{factor}, name=default",
                lambda c, factor=factor: vars(_moe(c)).update(
                    name=moe.MoEType.default, capacity_factor=factor
                ),
            )
            for factor in (0.5, EXPERTS / TOP_K)
        ],
        "router": [router.MoERouterConfig(top_k=TOP_K)],  # else L2RRouterConfig
        "shared_mlp": [FeedForwardConfig(hidden_size=16, bias=False)],
        "latent_moe": [moe.LatentMoEConfig(latent_dim=16)],
        "lb_loss_weight": [0.3],
        "lb_loss_granularity": [*MoELoadBalancingLossGranularity],
        "z_loss_weight": [0.3],
        "scale_loss_by_num_layers": [False],
        "dtype": _HALF,
    },
    L2RRouterConfig: {
        "name": [],  # of one kind
        "top_k": [1],
        "jitter_eps": [0.3],
        "normalize_expert_weights": [1.0, 2.0],
        "uniform_expert_assignment": [True],
        "random_expert_assignment": [True],
        "bias_gamma": [0.1],
        "gating_function": [*router.MoERouterGatingFunction],
        "dtype": _HALF,
        "router": [
            {"kind": "linear"},
            {"kind": "sigmoid"},
            {"kind": "l2r_sips", "rank": 2, "heads": 4, "selection_bias": True},
        ],
    },
    heads.LMHeadConfig: {
        "name": [*heads.LMHeadType],
        "layer_norm": [None],  # else norms.LayerNormConfig
        "bias": [True],
        "dtype": _HALF,
        "loss_implementation": [*heads.LMLossImplementation],
    },
}
# Arguments of modules that no field of a configuration sets, with another value of what they set.
ARGUMENTS: dict[tuple[type, str], Change] = {
    (mixers.Attention, "softmax_scale"): lambda m: setattr(m.attention.backend, "scale", 0.7),
    (mixers.TorchAttentionBackend, "scale"): lambda m: setattr(m.attention.backend, "scale", 0.7),
}
# Arguments that are sizes, places or caches, and those that fields above set under other names.
_PASSED = {
    *(
        "d_model",
        "vocab_size",
        "n_layers",
        "block_idx",
        "init_device",
        "cache",
        "size",
        "head_size",
        "head_dim",
    ),
    *(
        "n_heads",
        "n_kv_heads",
        "num_experts",
        "hidden_size",
        "weight_shape",
        "window_size",
        "kwargs",
    ),
    *("dropout_p", "router", "options", "lb_loss_weight", "lb_loss_granularity", "z_loss_weight"),
}
MODULES = {
    MoETransformer: models.TransformerConfig,
    blocks.MoETransformerBlock: models.TransformerBlockConfig,
    mixers.Attention: mixers.AttentionConfig,
    mixers.TorchAttentionBackend: mixers.AttentionConfig,
    ropes.RotaryEmbedding: ropes.RoPEConfig,
    norms.RMSNorm: norms.LayerNormConfig,
    moe.DroplessMoE: moe.MoEConfig,
    moe.MoE: moe.MoEConfig,
    mlp.DroplessMoEMLP: moe.MoEConfig,
    router.MoERouter: L2RRouterConfig,
    L2RMoERouter: L2RRouterConfig,
    heads.LMHead: heads.LMHeadConfig,
}


def arguments(module: type, of: type) -> list[str]:
    """Arguments of a module's constructor that no field of its configuration has."""
    fields = {field.name for field in dataclasses.fields(of)}
    names = list(inspect.signature(module.__init__).parameters)[1:]
    return [name for name in names if name not in fields and name not in _PASSED]


def make(change: Change | None = None) -> Any:
    """A small model with other settings and the weights of the plain one, where it has them."""
    on_cpu()
    config = configuration({"kind": "l2r_sips", "rank": 2, "heads": 4})
    mixer, head = config.block.sequence_mixer, config.lm_head
    mixer.qk_norm, head.layer_norm = mixer.qk_norm.copy(), head.layer_norm.copy()
    if change is not None:
        change(config)
    model = config.build()
    model.init_weights(device=torch.device("cpu"))
    _fill(model)
    return model.eval()


@torch.no_grad()
def _fill(model: Any) -> None:
    """Large weights, drawn by the name of each, so that the same tensor has the same values."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        seed = sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 2**31
        drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
        if "norm" in name and "weight" in name:
            drawn = 1 + 0.2 * drawn
        elif "score_bias" in name or "bias" in name:
            drawn = 0.3 * drawn
        elif "embeddings" not in name:
            drawn = drawn * 0.3
        value.copy_(drawn)


def logits(model: Any) -> torch.Tensor:
    """Logits [1, S, V] of fixed tokens."""
    ids = torch.arange(LENGTH).mul(37).add(11).remainder(VOCABULARY).unsqueeze(0)
    with torch.no_grad():
        return model(ids).float()


def cases() -> Iterator[tuple[str, str, str, Change]]:
    """Class, field, value and change of the model's configuration for every value."""
    for kind, values in VALUES.items():
        places = {"": PLACES[kind]}
        if kind is norms.LayerNormConfig:
            places |= NORMS
        for where, place in places.items():
            of = kind.__name__ + (f" of {where}" if where else "")
            for field, others in values.items():
                for value in others:
                    yield of, field, _shown(value), _change(place, field, value)
    of = "L2RRouterConfig of a sigmoid router"
    for change in ({}, {"bias_gamma": 0.1}, {"normalize_expert_weights": 1.0}):
        value = {"router": {"kind": "sigmoid"}, "gating_function": "sigmoid"} | change
        yield of, list(value)[-1], _shown(list(value.values())[-1]), _changes(value)


def _change(place: Callable[[Any], Any], field: str, value: Any) -> Change:
    if isinstance(value, Other):
        return value.put
    return lambda c: setattr(place(c), field, value)


def _changes(values: dict[str, Any]) -> Change:
    return lambda c: vars(_moe(c).router).update(values)


def rows() -> Iterator[Row]:
    """Every case, then every argument that has no field."""
    base = logits(make())
    for of, field, value, change in cases():
        yield _row(of, field, value, base, lambda change=change: make(change))
    for (module, name), change in ARGUMENTS.items():

        def changed(change: Change = change) -> Any:
            model = make()
            for block in model.blocks.values():
                change(block)
            return model

        yield _row(module.__name__, name, "0.7", base, changed)


def _row(of: str, field: str, value: str, base: torch.Tensor, build: Callable[[], Any]) -> Row:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = build()
            found = logits(model)
            half = model.lm_head.w_out.weight.dtype != torch.float32
        except Exception as error:
            said = f"{type(error).__name__}: {error}".strip().splitlines()[0][:150]
            return Row(of, field, value, None, "engine", said=said)
        moved = None
        if found.shape == base.shape:
            moved = float((found - base).abs().max() / base.abs().max())
        try:
            made = to_hugging_face(model, max_position_embeddings=LENGTH)
        except ValueError as error:
            return Row(of, field, value, moved, "refused", said=str(error))
        if half:
            return Row(of, field, value, moved, "equal")
        with torch.no_grad():
            exported = made(torch.arange(LENGTH).mul(37).add(11).remainder(VOCABULARY)[None]).logits
        difference = float((exported - found).abs().max() / found.abs().max())
        return Row(of, field, value, moved, "equal", difference)


def _shown(value: Any) -> str:
    return str(value)


def table(found: list[Row]) -> str:
    """Rows as Markdown, after a count."""
    count = Counter(row.outcome for row in found)
    shows = [row for row in found if row.outcome != "engine" and row.moved and row.moved > 0.01]
    fields = len({(row.of, row.field) for row in found})
    lines = [
        "# OLMo-core: every setting, and its export to Hugging Face",
        "",
        "Written by `.engines/olmo-core/bin/python -m tests.engines.olmo_core.walk` (a minute).",
        "The weights are the same throughout and large enough for attention and experts to matter.",
        "",
        f"ai2-olmo-core {metadata.version('ai2-olmo-core')}: {fields} fields and arguments, "
        f"{len(found)} values: {count['equal']} equal, {count['refused']} refused, "
        f"{count['engine']} that OLMo-core does not build or run on a CPU. "
        f"{len(shows)} move the engine's logits by over 1%.",
        "",
    ]
    return "\n".join([*lines, *walk_table(found)]) + "\n"


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table(list(rows())))
