"""Every setting of Megatron-core at another value, one at a time: exported equal, or refused.

    .engines/megatron/bin/python -W ignore -m tests.engines.megatron.walk

prints the rows of results/engines/megatron.md.

Weights are larger than freshly drawn ones, so that attention, experts and routers matter; all rows
have the same. A row moves where the engine's own logits change by over 1% of the largest.
"""

import dataclasses
import inspect
import os
import tempfile
import types
import typing
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from l2r.errors import InputError
from tests.engines.engines import walk_table

from .models import GPTModel, TransformerConfig, get_gpt_layer_local_spec, one_rank, scale

from l2r.engines.megatron import olmoe_layer  # isort: skip
from l2r.engines.megatron.checkpoint import _forward, to_hugging_face  # isort: skip

F = torch.nn.functional
LENGTH, VOCABULARY = 64, 512
SIPS = {"kind": "l2r_sips", "rank": 2, "heads": 16}
BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_moe_experts": 16,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "ffn_hidden_size": 64,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "moe_router_pre_softmax": True,
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "moe_token_dispatcher_type": "allgather",
    "bias_activation_fusion": False,
    "gradient_accumulation_fusion": False,
}
ARGUMENTS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_sequence_length": LENGTH,
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
}
SPEC: dict[str, Any] = {"num_experts": 16, "qk_layernorm": True, "normalization": "RMSNorm"}

# Values of fields whose type does not tell one that shows; a dictionary is a value with others.
VALUES: dict[str, list[Any]] = {
    "num_layers": [3],
    "hidden_size": [64],
    "num_attention_heads": [8],
    "num_query_groups": [2],
    "kv_channels": [16],
    "num_moe_experts": [8, None],
    "moe_router_topk": [1, 3],
    "moe_ffn_hidden_size": [32],
    "layernorm_epsilon": [0.5],
    "normalization": ["LayerNorm"],
    "activation_func": [F.gelu, F.relu],
    "window_size": [(8, 0)],
    "softmax_scale": [1.0],
    "glu_linear_offset": [1.0],
    "activation_func_clamp_value": [0.01],
    "no_rope_freq": [[1, 0], 2],
    "moe_layer_freq": [2, [0, 1], [1, 1]],
    "moe_expert_capacity_factor": [0.5, {"moe_expert_capacity_factor": 100.0}],
    "moe_token_drop_policy": [
        {"moe_token_drop_policy": "position", "moe_expert_capacity_factor": 0.5}
    ],
    "moe_router_load_balancing_type": [
        "seq_aux_loss",
        "global_aux_loss",
        "none",
        "sinkhorn",
        "quantile_balancing",
        {
            "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
            "moe_aux_loss_coeff": [0.01, 0.01],
        },
    ],
    "moe_router_num_groups": [{"moe_router_num_groups": 4, "moe_router_group_topk": 1}],
    "moe_router_group_topk": [{"moe_router_num_groups": 4, "moe_router_group_topk": 2}],
    "moe_router_score_function": ["sigmoid", "sqrtsoftplus"],
    "moe_router_enable_expert_bias": [
        {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    ],
    "moe_router_topk_scaling_factor": [2.5],
    "moe_shared_expert_intermediate_size": [64],
    "moe_input_jitter_eps": [0.5],
    "moe_router_force_biased": [1.0],
    "moe_mlp_glu_interleave_size": [32],
    "moe_latent_size": [64],
    "use_mup": [{"use_mup": True, "mup_base_hidden_size": 32}],
    "mup_embedding_mult": [4.0],
    "params_dtype": [torch.bfloat16],
    "bf16": [{"bf16": True, "params_dtype": torch.bfloat16}],
    "fp16": [{"fp16": True, "params_dtype": torch.float16}],
    "autocast_dtype": [torch.bfloat16],
    "pipeline_dtype": [torch.bfloat16],
    "mamba_training_ssm_states_dtype": [torch.bfloat16],
    "multi_latent_attention": [True],
    "heterogeneous_block_specs": [True],
    "init_method": [torch.nn.init.ones_],
    "output_layer_init_method": [torch.nn.init.ones_],
    "embedding_init_method": [torch.nn.init.ones_],
    "mtp_num_layers": [1],
    "recompute_modules": [["core_attn"]],
    "offload_modules": [["core_attn"]],
    "attention_backend": ["unfused"],
    "hierarchical_context_parallel_sizes": [[1]],
    "pipeline_model_parallel_layout": ["Ett|L"],
    # arguments of the model
    "vocab_size": [300],
    "max_sequence_length": [96],
    "position_embedding_type": ["learned_absolute", "none", "mrope", "yarn"],
    "rotary_percent": [0.5],
    "rotary_base": [500_000],
    "rope_scaling_factor": [{"rope_scaling_factor": 4.0, "rope_scaling": True}],
    "seq_len_interpolation_factor": [
        2.0,
        {"seq_len_interpolation_factor": 2.0, "rope_scaling": True},
    ],
}
# A router that selects by sigmoid, with the settings that go with it.
SIGMOID: list[dict[str, Any]] = [
    {"moe_router_score_function": "sigmoid"},
    {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5},
    {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    {"moe_router_score_function": "softmax"},
    {"moe_router_score_function": "sqrtsoftplus"},
]


@dataclasses.dataclass
class Row:
    """One setting: what it did to the engine's logits, and what became of the export.

    moved: largest change of a logit over the largest, None where the shape is another or nothing
    ran. outcome: equal, refused, or engine where Megatron itself has no such model on a CPU.
    difference: of the folder's logits, over the largest, None below fp32: there the export compares
    with the engine's routes, and by its rounding.
    """

    of: str
    field: str
    value: str
    moved: float | None
    outcome: str
    said: str
    difference: float | None = None


def rows() -> Iterator[Row]:
    """Every field of TransformerConfig, argument of GPTModel and argument of the layer's spec."""
    for field in dataclasses.fields(TransformerConfig):
        for value in _others(field.name, _default(field), field.type):
            yield _row("TransformerConfig", field.name, value, lambda v: _make(config=v))
    for settings in SIGMOID:
        name = list(settings)[-1]
        yield _row("with {'kind': 'sigmoid'}", name, settings, _make_sigmoid)
    for of, function, known, made in (
        ("GPTModel", GPTModel.__init__, ARGUMENTS, lambda v: _make(model=v)),
        ("get_gpt_layer_local_spec", get_gpt_layer_local_spec, SPEC, lambda v: _make(spec=v)),
    ):
        hints = typing.get_type_hints(function)
        for name, argument in inspect.signature(function).parameters.items():
            if argument.default is not inspect.Parameter.empty or name in known:
                default = known.get(name, argument.default)
                for value in _others(name, default, hints.get(name)):
                    yield _row(of, name, value, made)


def _make_sigmoid(changes: dict[str, Any]) -> Any:
    return _make(config=changes, router={"kind": "sigmoid"})


def _make(
    config: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    spec: dict[str, Any] | None = None,
    router: dict[str, Any] = SIPS,
) -> Any:
    layer = get_gpt_layer_local_spec(**SPEC | (spec or {}))
    olmoe_layer(layer, router)
    torch.manual_seed(0)
    settings = TransformerConfig(**BASE | (config or {}))
    made = GPTModel(settings, layer, **ARGUMENTS | (model or {}))
    return scale(made).eval()


def logits(model: Any) -> torch.Tensor:
    """Logits [1, S, V] of fixed tokens."""
    ids = torch.arange(LENGTH).mul(37).add(11).remainder(256).unsqueeze(0)
    with torch.no_grad():
        return _forward(model, ids).float()


def _row(of: str, name: str, value: Any, make: Any) -> Row:
    changes = value if isinstance(value, dict) else {name: value}
    shown = ", ".join(
        f"{n}={_shown(v)}" if len(changes) > 1 else _shown(v) for n, v in changes.items()
    )
    base = _base(of)
    try:
        model = make(changes)
    except InputError as error:
        return Row(of, name, shown, None, "refused", f"by the plug: {error}")
    except Exception as error:  # Megatron refuses in any way
        return Row(of, name, shown, None, "engine", _first_line(error))
    try:
        found = logits(model)
    except Exception as error:
        found, ran = None, _first_line(error)
    same = found is not None and found.shape == base.shape
    moved = float((found - base).abs().max() / base.abs().max()) if same else None
    if found is not None and not torch.isfinite(found).all():
        moved = None
    try:
        made = to_hugging_face(model)
    except InputError as error:
        return Row(of, name, shown, moved, "refused", str(error))
    except Exception:
        if found is None:
            return Row(of, name, shown, None, "engine", ran)
        raise
    ids = torch.arange(LENGTH).mul(37).add(11).remainder(256).unsqueeze(0)
    with torch.no_grad():
        ours = made(ids).logits.float()
    narrow = next(model.parameters()).dtype != torch.float32
    difference = None if narrow else float((ours - found).abs().max() / found.abs().max())
    return Row(of, name, shown, moved, "equal", "", difference)


_BASES: dict[str, torch.Tensor] = {}


def _base(of: str) -> torch.Tensor:
    kind = "sigmoid" if "sigmoid" in of else "sips"
    if kind not in _BASES:
        made = (
            _make_sigmoid({"moe_router_score_function": "sigmoid"})
            if kind == "sigmoid"
            else _make()
        )
        _BASES[kind] = logits(made)
    return _BASES[kind]


def _others(name: str, default: Any, hint: Any) -> list[Any]:
    default = BASE.get(name, default)
    if name in VALUES:
        return VALUES[name]
    if isinstance(default, (bool, int, float)):
        return [not default if isinstance(default, bool) else 2 * default or type(default)(1)]
    choices = [c for part in _parts(hint) for c in _choices(part) if c != default]
    if choices:
        return choices
    kinds = {typing.get_origin(part) or part for part in _parts(hint)}
    for kind, value in ((bool, True), (int, 2), (float, 0.5), (str, "other"), (list, [1])):
        if kind in kinds:
            return [value]
    return [lambda *args, **options: None]


def _parts(hint: Any) -> list[Any]:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [p for h in typing.get_args(hint) for p in _parts(h)] if union else [hint]


def _choices(hint: Any) -> list[Any]:
    if typing.get_origin(hint) is typing.Literal:
        return list(typing.get_args(hint))
    return list(hint) if isinstance(hint, type) and hasattr(hint, "__members__") else []


def _default(field: Any) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _shown(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:150]


def table(found: list[Row]) -> str:
    """Rows as Markdown, after a count."""
    count = Counter(row.outcome for row in found)
    shows = [row for row in found if row.outcome != "engine" and row.moved and row.moved > 0.01]
    fields = len({(row.of, row.field) for row in found})
    lines = [
        f"megatron-core {metadata.version('megatron-core')}: {fields} fields and arguments, "
        f"{len(found)} values: {count['equal']} equal, {count['refused']} refused, "
        f"{count['engine']} that Megatron does not build or run on a CPU. "
        f"{len(shows)} move the engine's logits by over 1%.",
        "",
    ]
    return "\n".join([*lines, *walk_table(found)]) + "\n"


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder, one_rank(Path(folder)):
        os.chdir(folder)  # config_logger_dir
        print(table(list(rows())))
