"""Settings of OLMo-core: which have an export to Hugging Face, said before the training.

    config = TransformerConfig.olmoe_1B_7B(vocab_size=50304)
    plug(config, {"kind": "l2r_sips", "rank": 2, "heads": 16})  # warns of each that has none

A model is held against an OLMoE that OLMo-core builds from the same sizes: every module must be of
the same class with the same attributes and parameters. What an OLMoE has as a setting of its own
goes into that model's sizes (``hugging_face_sizes``); what no logit depends on is in ``FREE``; all
else has no export, fields of a newer OLMo-core too.
"""

import enum
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from types import FunctionType
from typing import Any

import torch
from torch import nn

from l2r.engines.engine import Plug, selecting_as
from l2r.engines.olmo_core import L2RMoERouter, L2RRouterConfig
from l2r.errors import InputError
from l2r.routers import RouterConfig
from l2r.routers.selection_rule import Selection

from olmo_core.nn.attention import AttentionBackend  # isort: skip  # after our check of its version
from olmo_core.nn.layer_norm import (  # isort: skip
    CuTeRMSNorm,
    FusedRMSNorm,
    NemotronRMSNorm,
    QwenRMSNorm,
    RMSNorm,
)
from olmo_core.nn.moe import DroplessMoE  # isort: skip
from olmo_core.nn.moe.router import MoELinearRouter, MoERouter  # isort: skip
from olmo_core.nn.moe.parallel_mlp import ParallelMLP  # isort: skip
from olmo_core.nn.rope import ABFRoPEScalingConfig, RoPEScalingConfig, YaRNRoPEScalingConfig  # isort: skip
from olmo_core.nn.transformer import TransformerConfig  # isort: skip
from olmo_core.nn.transformer.block import MoEReorderedNormTransformerBlock, MoETransformerBlock  # isort: skip

# Attributes of modules that logits do not depend on.
FREE = {
    **dict.fromkeys(
        ("init_method", "init_seed", "init_std", "embedding_init_std", "init_device"),
        "the weights at the start",
    ),
    **dict.fromkeys(
        ("jitter_eps", "lb_loss_weight", "lb_loss_granularity", "z_loss_weight"),
        "the training",
    ),
    **dict.fromkeys(("use_recompute_qkv_prep", "mxfp8_save_qkv_for_backward"), "the backward pass"),
    **dict.fromkeys(("dtype", "full_precision"), "the arithmetic, which the proof repeats"),
    **dict.fromkeys(("cache", "num_params", "num_non_embedding_params"), "no setting"),
    **dict.fromkeys(
        ("group", "cp_mesh", "tp_mesh", "ep_mesh", "ep_pg", "cp_pg", "cp_enabled", "head_stride")
        + ("num_local_experts", "hidden_sharding_degree", "tp_degree", "max_local_microbatch_size"),
        "where tensors lie",
    ),
}
# What goes into the sizes of the Hugging Face model, or is looked at by itself.
_MAPPED = {
    "scaling": "rope_parameters",
    "tie_word_embeddings": "tie_word_embeddings",
    "bias_gamma": "selection_bias of the router",
    "normalize_expert_weights": "normalize_weights of the router",
    "gating_function": "gate of the router",
    "capacity_factor": "none is dropped",
    "plug": "router",
}
# The field of a configuration behind an attribute of another name.
_FIELDS = {
    "rotary_dim": "rotary_dim (of partial_rotary_factor)",
    "dropout_p": "dropout_p (of dropout)",
}
_INSTEAD = {
    "capacity_factor": "MoEType.dropless drops no token; to export all the same, raise "
    "block.experts.capacity_factor of every block after the training",
    "dropout_p": "OLMo-core drops in evaluation too; set block.attention.backend.dropout_p = 0 of "
    "every block after the training",
}
_NORMS = (RMSNorm, QwenRMSNorm, NemotronRMSNorm, FusedRMSNorm, CuTeRMSNorm)  # one formula
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")


def plug(config: TransformerConfig, router: Mapping[str, Any]) -> TransformerConfig:
    """Put a router of ours, the dictionary form of a RouterConfig, into every MoE block.

    Other fields of the routers' configurations stay. Warns in one line of each setting of
    ``config`` that has no export to Hugging Face. Returns ``config``, which is changed in place.
    Raises InputError where no block has experts.
    """
    blocks = [*(config.block.values() if isinstance(config.block, dict) else [config.block])]
    blocks += (config.block_overrides or {}).values()
    sparse = [block for block in blocks if block.feed_forward_moe is not None]
    if not sparse:
        raise InputError("a block must have feed_forward_moe for a router; none has")
    for block in sparse:
        fields = block.feed_forward_moe.router.as_dict(recurse=False)
        fields |= {"router": dict(router)}
        block.feed_forward_moe.router = L2RRouterConfig(**fields)
    for line in unexportable(_without_storage(config)):
        warnings.warn(line, stacklevel=2)
    return config


def check_exportable(model: Any) -> None:
    """Raise InputError with the settings of a model that have no export to Hugging Face."""
    lines = unexportable(model)
    if lines:
        more = f"; and {len(lines) - 2} more" if len(lines) > 2 else ""
        raise InputError("; ".join(lines[:2]) + more)


def unexportable(model: Any) -> list[str]:
    """List a line for each setting of a model, built or trained, that has no export; best none."""
    return [*dict.fromkeys(_lines(model))]


def hugging_face_sizes(model: Any) -> dict[str, Any]:
    """Fields of the Hugging Face configuration of an exportable model, but for its router."""
    block = blocks_of(model)[0]
    attention, mlp = block.attention, block.feed_forward_moe
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": mlp.experts.mlp.hidden_size,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "num_experts": mlp.num_experts,
        "num_experts_per_tok": mlp.top_k,
        "rms_norm_eps": block.feed_forward_norm.eps,
        "rope_parameters": _rope(attention.rope),
        "tie_word_embeddings": model.tie_word_embeddings,
    }


def post_norm(model: Any) -> bool:
    """Return whether norms follow the sublayers, as in FlexOlmo."""
    return isinstance(blocks_of(model)[0], MoEReorderedNormTransformerBlock)


def router_config(router: MoERouter) -> RouterConfig:
    """Return the configuration with which a router alone selects as it did in the engine.

    Raises InputError where there is none.
    """
    normalize, template = router.normalize_expert_weights, plug_of(router).router
    gate, own = str(router.gating_function), template.own_selection().gate
    if normalize not in (None, 1.0):
        raise InputError(
            "block.feed_forward_moe.router.normalize_expert_weights must be None or 1 for an "
            f"export to Hugging Face; got {normalize}"
        )
    if gate != own and not hasattr(template.config, "gate"):
        raise InputError(
            f"block.feed_forward_moe.router.gating_function must be {own} with a router of kind "
            f"{template.config.kind} for an export to Hugging Face; got {gate}"
        )
    rule = Selection(
        gate=gate,  # type: ignore[arg-type]
        normalize=normalize is not None,
        bias=None if router.bias_gamma is None else "score_bias",
    )
    return selecting_as(template, rule)


def plug_of(router: MoERouter) -> Plug:
    """Our template of a router: of ours, or of the engine's own linear one."""
    if isinstance(router, L2RMoERouter):
        return router.plug
    sizes = {"hidden_size": router.d_model, "num_experts": router.num_experts}
    return Plug({"kind": "linear"}, seed=0, top_k=router.top_k, **sizes)


def blocks_of(model: Any) -> list[Any]:
    """Blocks of a model, without the wrappers of activation checkpointing."""
    return [_unwrapped(block) for block in model.blocks.values()]


def _unwrapped(module: Any) -> Any:
    """Return the module inside those of activation checkpointing and torch.compile."""
    for name in _WRAPPERS:
        if name in module._modules:
            return _unwrapped(module._modules[name])
    return module


def _lines(model: Any) -> Iterator[str]:
    for block in blocks_of(model):
        router = getattr(getattr(block, "feed_forward_moe", None), "router", None)
        kinds = (MoETransformerBlock, MoEReorderedNormTransformerBlock)
        if _kind(block) not in kinds or not isinstance(router, L2RMoERouter | MoELinearRouter):
            yield (
                "every block must be a MoETransformerBlock or a MoEReorderedNormTransformerBlock "
                f"with a router of ours for an export to Hugging Face; got {_kind(block).__name__} "
                f"with {type(router).__name__}"
            )
            return
        yield from router_lines(router)
    rope = blocks_of(model)[0].attention.rope
    try:
        _rope(rope)
    except InputError as error:
        yield str(error)
    yield from _unlike(model, _olmoe(model))


def router_lines(router: MoERouter) -> Iterator[str]:
    """List a line for each setting of a router that has no export to Hugging Face."""
    try:
        router_config(router)
    except InputError as error:
        yield str(error)
    for name in ("uniform_expert_assignment", "random_expert_assignment"):
        if getattr(router, name):
            yield _line(f"block.feed_forward_moe.router.{name}", False, True)


def _rope(rope: Any) -> dict[str, Any]:
    """Rotary frequencies as Hugging Face names them. InputError for those that it has not."""
    theta, scaling = getattr(rope, "theta", 10_000), getattr(rope, "scaling", None)
    found = {"rope_type": "default", "rope_theta": float(theta)}
    if scaling is None:
        return found
    if isinstance(scaling, RoPEScalingConfig):
        factor = getattr(scaling, "attention_rescale_factor", 1.0)
        if factor != 1.0 and not isinstance(scaling, YaRNRoPEScalingConfig):
            raise InputError(
                "block.attention.rope.scaling.attention_rescale_factor must be 1 for an export to "
                f"Hugging Face; got {factor}"
            )
        if isinstance(scaling, ABFRoPEScalingConfig):
            return found | {"rope_theta": float(scaling.new_theta)}
        try:
            return found | scaling.to_hf_config()
        except NotImplementedError:  # OLMo-core's word for a kind that Hugging Face lacks
            pass
    raise InputError(
        "block.attention.rope.scaling must be of a kind that Hugging Face has; got "
        f"{type(scaling).__name__}"
    )


def _olmoe(model: Any) -> nn.Module:
    """OLMo-core's own OLMoE of the sizes of ``model``, without storage."""
    block = blocks_of(model)[0]
    attention, mlp = block.attention, block.feed_forward_moe
    config = TransformerConfig.llama_like_moe(
        d_model=model.d_model,
        vocab_size=model.vocab_size,
        n_layers=model.n_layers,
        n_heads=attention.n_heads,
        n_kv_heads=attention.n_kv_heads,
        qk_norm=True,
        num_experts=mlp.num_experts,
        top_k=mlp.top_k,
        expert_hidden_size=mlp.experts.mlp.hidden_size,
        dropless=_kind(mlp) is DroplessMoE,
        reordered_norm=_kind(block) is MoEReorderedNormTransformerBlock,
        layer_norm_eps=block.feed_forward_norm.eps,
        rope_theta=getattr(attention.rope, "theta", 10_000),
    )
    if isinstance(mlp.router, L2RMoERouter):
        config.block.feed_forward_moe.router = L2RRouterConfig(
            top_k=mlp.top_k, router=mlp.router.plug.router.config.to_dict()
        )
    return _without_storage(config)


def _without_storage(config: TransformerConfig) -> nn.Module:
    """Build the model of a configuration, without router warnings and random numbers."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        return config.build(init_device="meta")


def _unlike(model: Any, olmoe: nn.Module) -> Iterator[str]:
    """Lines on what of ``model`` is not as in ``olmoe``, settings before the parts they make."""
    theirs, ours = _parts(model), _parts(olmoe)
    for path, module in theirs.items():
        if path in ours:
            yield from _unlike_attributes(path, module, ours[path])
    for path in [*ours, *(path for path in theirs if path not in ours)]:
        part, wanted = theirs.get(path), ours.get(path)
        if part is not None and wanted is not None and _same_kind(part, wanted):
            for name in sorted(_held(part) ^ _held(wanted)):
                there = "must not" if name in _held(part) else "must"
                yield f"{_said(path)}.{name} {there} be there for an export to Hugging Face"
        elif path.rpartition(".")[0] in theirs.keys() & ours.keys():
            yield _line(path, *(m and _kind(m).__name__ for m in (wanted, part)))


def _unlike_attributes(path: str, part: Any, wanted: Any) -> Iterator[str]:
    usual = vars(nn.Module())
    mine, others = vars(part), vars(wanted)
    prefix = f"{path}." if path else ""
    for name in [*mine, *(name for name in others if name not in mine)]:
        if name.startswith("_") or name in usual or name in FREE or name in _MAPPED:
            continue
        value, right = mine.get(name), others.get(name)
        method = callable(getattr(type(part), name, None))  # one that somebody put around it
        if not method and _is_setting(value) and _is_setting(right) and value != right:
            yield _line(prefix + name, right, value)
    if isinstance(part, ParallelMLP):
        min_factor = part.mlp.num_experts / part.top_k
        if part.capacity_factor < min_factor:
            yield _line(
                f"{path}.capacity_factor",
                f">= num_experts / top_k = {min_factor:g}",
                part.capacity_factor,
            )


def _parts(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by path, without wrappers, parallel ones' too; all blocks as one path where alike."""
    parts = {}
    for path, module in model.named_modules():
        names = [name for name in path.split(".") if name not in _WRAPPERS]
        if "dropout" not in names[2:3]:  # of a block, which is off in evaluation
            parts[".".join(names)] = _unwrapped(module)
    return parts


def _kind(module: Any) -> type:
    """Class of a module, of which FSDP2 and DDP make subclasses."""
    return next(c for c in type(module).__mro__ if not c.__module__.startswith("torch.distributed"))


def _same_kind(part: nn.Module, wanted: nn.Module) -> bool:
    kinds = _kind(part), _kind(wanted)
    alike = all(issubclass(kind, AttentionBackend) for kind in kinds)
    return kinds[0] is kinds[1] or alike or all(kind in _NORMS for kind in kinds)


def _held(module: nn.Module) -> set[str]:
    tensors = {**module._parameters, **module._buffers}
    return {name for name, value in tensors.items() if value is not None and name != "score_bias"}


def _is_setting(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_setting(part) for part in value)
    plain = bool | int | float | str | enum.Enum | torch.dtype | FunctionType | None
    return isinstance(value, plain) or is_dataclass(value)


def _line(path: str, wanted: Any, value: Any) -> str:
    name = path.rpartition(".")[2]
    line = f"{_said(path)} must be {wanted} for an export to Hugging Face; got {value}"
    return f"{line} ({_INSTEAD[name]})" if name in _INSTEAD else line


def _said(path: str) -> str:
    """Return a path as it is named in a line: one for a setting of all blocks."""
    *before, name = path.split(".")
    path = ".".join([*before, _FIELDS.get(name, name)])
    return re.sub(r"^blocks\.\d+", "block", path) or "the model"
