"""OLMoEs trained in Megatron-core as Hugging Face folders of ours, and back.

    to_hugging_face(model).save_pretrained("out")

For a GPTModel or HybridModel whose layers ``olmoe_layer`` made, without its wrappers (DDP,
Float16Module), on one rank: a distributed checkpoint of several ranks is first loaded into such a
model, as Megatron does by itself.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from l2r.engines.engine import check_router, check_sizes, selecting_as
from l2r.engines.megatron import HeadsNorm, L2RTopKRouter
from l2r.engines.megatron.routes import record
from l2r.engines.megatron.settings import (
    arguments_without_export,
    check_exportable,
    fields_without_export,
    rope_parameters,
    selection_rule,
)
from l2r.engines.olmoe_tensors import OlmoeTensors, Pair, copy_all, olmoe, router_pairs
from l2r.engines.proof import prove
from l2r.errors import InputError
from l2r.routers.observe import evaluating


def to_hugging_face(model: Any, **settings: Any) -> Any:
    """Return a GPTModel or HybridModel of one rank as L2rOlmoeForCausalLM, in fp32.

    ``settings`` are further fields of its configuration (token ids); ``max_position_embeddings`` is
    the model's ``max_sequence_length`` by default. Both models run on so many random tokens, and
    must give the same logits.
    Raises ValueError for a model that is not an OLMoE, or that the folder would not equal.
    """
    c, router = model.config, _check(model)
    made = olmoe(
        selecting_as(router.l2r, selection_rule(c)),
        **_sizes(model),
        tie_word_embeddings=model.share_embeddings_and_output_weights,
        **{"max_position_embeddings": model.max_sequence_length} | settings,
    )
    copy_all(made, model.state_dict(), partial(_pairs, model))
    made.eval()
    with evaluating(model):
        positions = made.config.max_position_embeddings
        routes = None if c.moe_router_fusion else record(model)
        prove(partial(_forward, model), made, positions=positions, record=routes)
    return made


def _sizes(model: Any) -> dict[str, Any]:
    """Fields of a configuration that a model of the same tensors must share."""
    c = model.config
    return {
        "vocab_size": model.embedding.word_embeddings.weight.shape[0],
        "hidden_size": c.hidden_size,
        "intermediate_size": c.moe_ffn_hidden_size,
        "num_hidden_layers": len(_layers(model)),
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_query_groups,
        "num_experts": c.num_moe_experts,
        "num_experts_per_tok": c.moe_router_topk,
        "rms_norm_eps": c.layernorm_epsilon,
        "rope_parameters": rope_parameters(model),
    }


def without_export(model: Any) -> list[str]:
    """Return a line for each setting of a model that ``to_hugging_face`` would refuse, on any rank.

    Before the training; the plug has already warned of those in the configuration.
    """
    routers = [module for module in model.modules() if isinstance(module, L2RTopKRouter)]
    fields = fields_without_export(model.config, routers[0].l2r) if routers else []
    return fields + arguments_without_export(model)


def _forward(model: Any, ids: Tensor) -> Tensor:
    """Logits [1, S, V] of ids [1, S]."""
    length, device = ids.shape[1], model.embedding.word_embeddings.weight.device
    places = torch.arange(length, device=device).unsqueeze(0)
    hidden = torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)
    logits: Tensor = model(ids.to(device), places, hidden)
    return logits


def load_hugging_face(model: Any, source: Any) -> None:
    """Fill a model of one rank from a Hugging Face model of the same sizes and routers.

    Raises ValueError, before anything is copied, where they differ.
    """
    router = _check(model)
    check_sizes(source.config, _sizes(model))
    check_router(source, selecting_as(router.l2r, selection_rule(model.config)))
    copy_all(source, model.state_dict(), partial(_pairs, model), to_engine=True)


def _check(model: Any) -> L2RTopKRouter:
    """First router of an OLMoE of ours. Raises ValueError for another model."""
    routers = [module for module in model.modules() if isinstance(module, L2RTopKRouter)]
    for number, (attention, mlp) in enumerate(_layers(model)):
        router = getattr(mlp.mlp, "router", None)
        norm = getattr(attention.self_attention, "q_layernorm", None)
        if not (isinstance(router, L2RTopKRouter) and isinstance(norm, HeadsNorm)):
            raise InputError(f"every layer must come from olmoe_layer; layer {number} does not")
    check_exportable(model, routers[0].l2r)
    return routers[0]


def _layers(model: Any) -> list[tuple[Any, Any]]:
    """Return the layer with the attention and that with the experts of each layer of an OLMoE."""
    layers = list(model.decoder.layers)
    pattern = getattr(model, "hybrid_layer_pattern", None)
    if pattern is None:
        return [(layer, layer) for layer in layers]
    if not layers or pattern != "*E" * (len(layers) // 2):
        raise InputError(
            "hybrid_layer_pattern must be *E for each layer of an OLMoE, *E*E for two; "
            f"got {pattern}"
        )
    return list(zip(layers[::2], layers[1::2], strict=True))


def _pairs(model: Any, ours: OlmoeTensors, theirs: OlmoeTensors) -> Iterator[Pair]:
    """Pair every tensor of a Hugging Face model with that of the engine, as views."""
    c, heads = model.config, model.config.num_attention_heads // model.config.num_query_groups
    embedding = ours.take("model.embed_tokens.weight")
    yield embedding, theirs.take("embedding.word_embeddings.weight")
    hybrid = hasattr(model, "hybrid_layer_pattern")
    norm = "final_norm" if hybrid else "final_layernorm"
    yield ours.take("model.norm.weight"), theirs.take(f"decoder.{norm}.weight")
    head = ours.take("lm_head.weight")
    if not model.share_embeddings_and_output_weights:
        yield head, theirs.take("output_layer.weight")
    elif head.data_ptr() != embedding.data_ptr() and not torch.equal(head, embedding):
        raise InputError(
            "share_embeddings_and_output_weights must be False for a model whose output weights "
            "are not its embeddings; got True"
        )
    for index, (_, layer) in enumerate(_layers(model)):
        here, there = f"model.layers.{index}.", f"decoder.layers.{index * (1 + hybrid)}."
        experts = f"decoder.layers.{2 * index + 1}." if hybrid else there
        attention, mlp = f"{there}self_attention.", f"{experts}mlp."
        # Transformer Engine keeps the first norm inside the projection that follows it.
        inside = attention + "linear_qkv.layer_norm_weight"
        norm = inside if inside in theirs.left else there + "input_layernorm.weight"
        yield ours.take(here + "input_layernorm.weight"), theirs.take(norm)
        for name, other in (
            ("post_attention_layernorm", experts + "pre_mlp_layernorm"),
            ("self_attn.o_proj", attention + "linear_proj"),
            ("self_attn.q_norm", attention + "q_layernorm"),
            ("self_attn.k_norm", attention + "k_layernorm"),
        ):
            yield ours.take(f"{here}{name}.weight"), theirs.take(f"{other}.weight")
        # Rows of a group: its queries, its key, its value.
        rows = theirs.take(attention + "linear_qkv.weight")
        qkv = rows.view(c.num_query_groups, heads + 2, c.kv_channels, -1)
        for name, part in (("q", qkv[:, :-2]), ("k", qkv[:, -2:-1]), ("v", qkv[:, -1:])):
            yield ours.take(f"{here}self_attn.{name}_proj.weight").view(part.shape), part
        router = layer.mlp.router
        names = {name: f"{mlp}router.l2r.{name}" for name, _ in router.l2r.named_parameters()}
        theirs.left.pop(f"{mlp}router.l2r.{router.l2r.selection.bias}", None)  # nothing reads it
        bias = f"{mlp}router.expert_bias" if c.moe_router_enable_expert_bias else None
        yield from router_pairs(router.l2r, here + "mlp.gate.", ours, theirs, names, bias)
        for name, fc in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
            for expert, value in enumerate(ours.take(f"{here}mlp.experts.{name}")):
                grouped = f"{mlp}experts.{fc}.weight{expert}"  # Transformer Engine's
                single = f"{mlp}experts.local_experts.{expert}.{fc}.weight"
                yield value, theirs.take(grouped if grouped in theirs.left else single)
