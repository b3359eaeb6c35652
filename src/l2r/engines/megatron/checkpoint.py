"""OLMoEs trained in Megatron-core as Hugging Face folders of ours, and back.

    to_hugging_face(model, max_position_embeddings=4096).save_pretrained("out")

For a GPTModel whose layers ``olmoe_layer`` made, without its wrappers (DDP, Float16Module), on
one rank: a distributed checkpoint of several ranks is first loaded into such a model, as Megatron
does by itself. Capacity drops tokens in Megatron; the Hugging Face model drops none.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from l2r.engines.engine import selecting_as
from l2r.engines.megatron import HeadsNorm, L2RTopKRouter
from l2r.engines.olmoe_tensors import Pair, Tensors, copy_all, olmoe, router_pairs
from l2r.errors import InputError
from l2r.routers.selection_rule import Selection

# What an OLMoE has; other values of these fields make another model, not always one with other
# tensors. The last two are not there in the oldest Megatron.
_FIXED = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": nn.functional.silu,
    "layernorm_zero_centered_gamma": False,
    "apply_residual_connection_post_layernorm": False,
    "rotary_interleaved": False,
    "window_size": None,
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "no_rope_freq": None,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "moe_apply_probs_on_input": False,
    "moe_router_num_groups": None,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "moe_mlp_glu_interleave_size": None,
    "use_mup": False,
}


def to_hugging_face(model: Any, **settings: Any) -> Any:
    """A GPTModel of one rank as L2rOlmoeForCausalLM, in fp32.

    ``settings`` are further fields of its configuration (max_position_embeddings, token ids).
    Raises ValueError for a model that is not an OLMoE, or whose routers select in a way that
    the checkpoint would not.
    """
    c, router = model.config, _check(model)
    softmax = c.moe_router_score_function == "softmax"
    rule = Selection(
        gate=c.moe_router_score_function,
        normalize=not c.moe_router_pre_softmax if softmax else c.moe_router_topk > 1,
        scale=c.moe_router_topk_scaling_factor or 1.0,
        bias="expert_bias" if c.moe_router_enable_expert_bias else None,
    )
    made = olmoe(
        selecting_as(router.l2r, rule),
        vocab_size=model.embedding.word_embeddings.weight.shape[0],
        hidden_size=c.hidden_size,
        intermediate_size=c.moe_ffn_hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_query_groups,
        num_experts=c.num_moe_experts,
        num_experts_per_tok=c.moe_router_topk,
        rms_norm_eps=c.layernorm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": float(model.rotary_base)},
        tie_word_embeddings=model.share_embeddings_and_output_weights,
        **settings,
    )
    copy_all(made, model.state_dict(), partial(_pairs, model))
    return made.eval()


def load_hugging_face(model: Any, source: Any) -> None:
    """Fill a GPTModel of one rank from a Hugging Face model of the same sizes."""
    _check(model)
    copy_all(source, model.state_dict(), partial(_pairs, model), to_engine=True)


def _check(model: Any) -> L2RTopKRouter:
    """First router of an OLMoE of ours. Raises ValueError for another model."""
    for name, wanted in _FIXED.items():
        value = getattr(model.config, name, wanted)
        if value != wanted:
            raise InputError(f"{name} must be {wanted} to convert an OLMoE; got {name}={value}")
    for number, layer in enumerate(model.decoder.layers):
        attention, router = layer.self_attention, getattr(layer.mlp, "router", None)
        ours = isinstance(router, L2RTopKRouter) and isinstance(attention.q_layernorm, HeadsNorm)
        if not ours:
            raise InputError(f"every layer must come from olmoe_layer; layer {number} does not")
    first: L2RTopKRouter = model.decoder.layers[0].mlp.router
    return first


def _pairs(model: Any, ours: Tensors, theirs: Tensors) -> Iterator[Pair]:
    """Pair every tensor of a Hugging Face model with that of the engine, as views."""
    c, heads = model.config, model.config.num_attention_heads // model.config.num_query_groups
    yield ours.take("model.embed_tokens.weight"), theirs.take("embedding.word_embeddings.weight")
    yield ours.take("model.norm.weight"), theirs.take("decoder.final_layernorm.weight")
    yield ours.take("lm_head.weight"), theirs.take("output_layer.weight")
    for index, layer in enumerate(model.decoder.layers):
        here, there = f"model.layers.{index}.", f"decoder.layers.{index}."
        attention, mlp = f"{there}self_attention.", f"{there}mlp."
        # Transformer Engine keeps the first norm inside the projection that follows it.
        inside = attention + "linear_qkv.layer_norm_weight"
        norm = inside if inside in theirs.left else there + "input_layernorm.weight"
        yield ours.take(here + "input_layernorm.weight"), theirs.take(norm)
        for name, other in (
            ("post_attention_layernorm", there + "pre_mlp_layernorm"),
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
