"""Models trained in OLMo-core as Hugging Face folders of ours, and back.

    model = to_hugging_face(olmo_core_model, max_position_embeddings=4096)
    if model is not None:  # rank 0
        model.save_pretrained("out")

Blocks named ``moe`` become L2rOlmoe; ``moe_reordered_norm``, which OLMo-core's own
``olmoe_1B_7B`` has, becomes FlexOlmo with our routers. Works on plain, FSDP2 and TP models.
Experts with a capacity drop tokens in OLMo-core; the Hugging Face model drops none.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as sharded

from l2r.engines.engine import selecting_as
from l2r.engines.olmo_core import L2RMoERouter
from l2r.engines.olmoe_tensors import Pair, Tensors, copy_all, olmoe, router_pairs
from l2r.errors import InputError
from l2r.routers.selection_rule import Selection

from olmo_core.nn.moe.mlp import DroplessMoEMLP  # isort: skip  # after our check of its version
from olmo_core.nn.transformer.block import MoEReorderedNormTransformerBlock  # isort: skip

_MODEL = {
    "model.embed_tokens.weight": "embeddings.weight",
    "model.norm.weight": "lm_head.norm.weight",
    "lm_head.weight": "lm_head.w_out.weight",
}
_LAYER = {
    f"self_attn.{ours}.weight": f"attention.{theirs}.weight"
    for ours, theirs in (("q_proj", "w_q"), ("k_proj", "w_k"), ("v_proj", "w_v"))
    + (("o_proj", "w_out"), ("q_norm", "q_norm"), ("k_norm", "k_norm"))
}
_PRE = {
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "feed_forward_norm.weight",
}
_POST = {
    "post_attention_layernorm.weight": "attention_norm.weight",
    "post_feedforward_layernorm.weight": "feed_forward_norm.weight",
}


def to_hugging_face(model: nn.Module, **settings: Any) -> Any:
    """The model on Hugging Face, in fp32 on the CPU; None on ranks other than 0.

    ``settings`` are further fields of its configuration (max_position_embeddings, token ids).
    Raises ValueError for a model that is no OLMoE, or whose routers select otherwise.
    """
    block, post_norm = _block(model)
    attention, mlp = block.attention, block.feed_forward_moe
    normalize = mlp.router.normalize_expert_weights
    if normalize not in (None, 1.0):
        raise InputError(f"normalize_expert_weights must be None or 1; got {normalize}")
    rule = Selection(
        gate=str(mlp.router.gating_function),  # type: ignore[arg-type]
        normalize=normalize is not None,
        bias=None if mlp.router.bias_gamma is None else "score_bias",
    )
    sizes = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": mlp.experts.mlp.hidden_size,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "num_experts": mlp.num_experts,
        "num_experts_per_tok": mlp.top_k,
        "rms_norm_eps": block.feed_forward_norm.eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(attention.rope.theta)},
        "tie_word_embeddings": model.tie_word_embeddings,
    }
    if attention.clip_qkv is not None:
        sizes["clip_qkv"] = attention.clip_qkv
    config = selecting_as(mlp.router.plug.router, rule)
    options = sharded.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = sharded.get_model_state_dict(model, options=options)
    if not state:
        return None
    made = olmoe(config, post_norm=post_norm, **sizes, **settings)
    copy_all(made, state, partial(_pairs, model))
    return made.eval()


def load_hugging_face(model: nn.Module, source: Any) -> None:
    """Fill an OLMo-core model, sharded or not, from a Hugging Face model of the same sizes.

    With several ranks, ``source`` is read on rank 0 alone.
    """
    _block(model)
    options = sharded.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = sharded.get_model_state_dict(model, options=options)
    if state:
        copy_all(source, state, partial(_pairs, model), to_engine=True)
    shared = dist.is_available() and dist.is_initialized()
    options = sharded.StateDictOptions(full_state_dict=True, broadcast_from_rank0=shared)
    sharded.set_model_state_dict(model, state, options=options)


def _block(model: Any) -> tuple[Any, bool]:
    """First block, and whether norms follow the sublayers. ValueError for what is no OLMoE."""
    first = model.blocks["0"]
    post_norm = isinstance(first, MoEReorderedNormTransformerBlock)
    for block in model.blocks.values():
        alike = isinstance(block, MoEReorderedNormTransformerBlock) == post_norm
        if not alike or not isinstance(getattr(block, "router", None), L2RMoERouter):
            raise InputError(
                "every block must be of one kind and have an L2RMoERouter; got "
                f"{type(block).__name__} with {type(getattr(block, 'router', None)).__name__}"
            )
        attention = block.attention
        for name, value in (
            ("rope.scaling", attention.rope.scaling),
            ("window_size", attention.window_size),
            ("softmax_scale", attention.backend.scale),
            ("embed_scale", model.embed_scale),
        ):
            if value is not None:
                raise InputError(f"{name} must be None in an OLMoE; got {name}={value}")
    return first, post_norm


def _pairs(model: Any, ours: Tensors, theirs: Tensors) -> Iterator[Pair]:
    """Pair every tensor of a Hugging Face model with that of the engine, as views."""
    names = _LAYER | (_POST if _block(model)[1] else _PRE)
    for here, there in _MODEL.items():
        yield ours.take(here), theirs.take(there)
    for index, block in enumerate(model.blocks.values()):
        layer, name = f"model.layers.{index}.", f"blocks.{index}."
        for here, there in names.items():
            yield ours.take(layer + here), theirs.take(name + there)
        name += "feed_forward_moe."
        plug = block.router.plug
        flat = {here: f"{name}router.{there}" for there, here in plug.names.items()}
        bias = None if block.router.bias_gamma is None else f"{name}router.score_bias"
        yield from router_pairs(plug.router, f"{layer}mlp.gate.", ours, theirs, flat, bias)
        gate_up = ours.take(layer + "mlp.experts.gate_up_proj")
        gate, up = gate_up.chunk(2, dim=1)  # [N, F, D] each
        down = ours.take(layer + "mlp.experts.down_proj").transpose(1, 2)
        if not isinstance(block.experts.mlp, DroplessMoEMLP):  # [N D, F] instead of [N F, D]
            gate, up = gate.transpose(1, 2), up.transpose(1, 2)
        for value, w in ((gate, "w1"), (up, "w3"), (down, "w2")):
            yield value, theirs.take(f"{name}experts.mlp.{w}").view(value.shape)
