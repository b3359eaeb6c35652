"""Models trained in OLMo-core as Hugging Face folders of ours, and back.

    model = to_hugging_face(olmo_core_model, max_position_embeddings=4096)
    if model is not None:  # rank 0
        model.save_pretrained("out")

Blocks named ``moe`` become L2rOlmoe; ``moe_reordered_norm``, which OLMo-core's own
``olmoe_1B_7B`` has, becomes FlexOlmo with our routers. Works on plain, FSDP2, EP and TP models.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict as sharded
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from l2r.engines.engine import check_router, check_sizes
from l2r.engines.olmo_core.routes import record
from l2r.engines.olmo_core.settings import (
    blocks_of,
    check_exportable,
    hugging_face_sizes,
    plug_of,
    post_norm,
    router_config,
)
from l2r.engines.olmoe_tensors import (
    OlmoeTensors,
    Pair,
    copy_all,
    olmoe,
    olmoe_config,
    router_pairs,
)
from l2r.engines.proof import ask, compare, on_first_rank
from l2r.routers.observe import evaluating

from olmo_core.nn.moe.mlp import DroplessMoEMLP  # isort: skip  # after our check of its version

# Settings of a Hugging Face model that OLMo-core has not, or has elsewhere.
PLAIN = {"clip_qkv": None, "attention_bias": False, "hidden_act": "silu"}
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


def to_hugging_face(model: Any, **settings: Any) -> Any:
    """Return the model on Hugging Face, in fp32 on the CPU; None on ranks other than 0.

    Every rank calls it. ``settings`` are further fields of its configuration
    (max_position_embeddings, token ids). The two models are compared on one row of random tokens,
    as many as max_position_embeddings; see l2r.engines.proof. Raises InputError, on every rank,
    for settings that have no export (``unexportable``), and where logits differ.
    """
    check_exportable(model)
    sizes = hugging_face_sizes(model) | settings
    reordered = post_norm(model)
    options = sharded.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = sharded.get_model_state_dict(model, options=options)
    positions = olmoe_config(post_norm=reordered, **sizes).max_position_embeddings
    with evaluating(model):
        logits = partial(_logits, model)
        answer = ask(logits, model.vocab_size, positions=positions, record=record(model))
    for module in model.modules():
        if isinstance(module, FSDPModule):  # those that a forward pass leaves whole
            module.reshard()

    def made() -> Any:
        config = router_config(blocks_of(model)[0].feed_forward_moe.router)
        exported = olmoe(config, post_norm=reordered, **sizes)
        copy_all(exported, state, partial(_pairs, model))
        compare(answer, exported)
        return exported.eval()

    return on_first_rank(made)


def _logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids.to(model.device))
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def load_hugging_face(model: Any, source: Any) -> None:
    """Fill an OLMo-core model, sharded or not, from a Hugging Face model of the same sizes.

    Every rank calls it; with several, ``source`` is read on rank 0 alone. Routers are ours, or
    OLMo-core's own linear ones for a stock OLMoE. Raises InputError, on every rank and before
    anything is copied, where sizes, rotary frequencies or tensors of the two differ.
    """
    options = sharded.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = sharded.get_model_state_dict(model, options=options)
    sizes = hugging_face_sizes(model) | PLAIN
    router = blocks_of(model)[0].feed_forward_moe.router

    def copy() -> None:
        if source.config.model_type == "olmoe":
            sizes["norm_topk_prob"] = router.normalize_expert_weights is not None
        else:  # routers of ours say it themselves
            check_router(source, router_config(router))
        check_sizes(source.config, sizes)
        copy_all(source, state, partial(_pairs, model), to_engine=True)

    on_first_rank(copy)
    shared = dist.is_available() and dist.is_initialized()
    options = sharded.StateDictOptions(full_state_dict=True, broadcast_from_rank0=shared)
    sharded.set_model_state_dict(model, state, options=options)


def _pairs(model: Any, ours: OlmoeTensors, theirs: OlmoeTensors) -> Iterator[Pair]:
    """Pair every tensor of a Hugging Face model with that of the engine, as views."""
    names = _LAYER | (_POST if post_norm(model) else _PRE)
    for here, there in _MODEL.items():
        if there == "lm_head.w_out.weight" and model.tie_word_embeddings:
            ours.drop(here)
            theirs.drop(there)
            continue
        yield ours.take(here), theirs.take(there)
    for index, block in enumerate(blocks_of(model)):
        layer, name = f"model.layers.{index}.", f"blocks.{index}."
        for here, there in names.items():
            yield ours.take(layer + here), theirs.take(name + there)
        name += "feed_forward_moe."
        router = block.feed_forward_moe.router
        plug = plug_of(router)
        flat = {here: f"{name}router.{there}" for there, here in plug.names.items()}
        bias = None if router.bias_gamma is None else f"{name}router.score_bias"
        yield from router_pairs(plug.router, f"{layer}mlp.gate.", ours, theirs, flat, bias)
        gate_up = ours.take(layer + "mlp.experts.gate_up_proj")
        gate, up = gate_up.chunk(2, dim=1)  # [N, F, D] each
        down = ours.take(layer + "mlp.experts.down_proj").transpose(1, 2)
        if not isinstance(block.experts.mlp, DroplessMoEMLP):  # [N D, F] instead of [N F, D]
            gate, up = gate.transpose(1, 2), up.transpose(1, 2)
        for value, w in ((gate, "w1"), (up, "w3"), (down, "w2")):
            yield value, theirs.take(f"{name}experts.mlp.{w}").view(value.shape)
