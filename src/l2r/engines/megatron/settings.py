"""Settings of Megatron-core: which an OLMoE on Hugging Face holds, and what is said of the others.

Every field of a TransformerConfig, and every argument of its model, is carried over, or has no
effect on the logits (``FREE``, by the reason), or must have one value: that in ``FIXED``, else its
default. So a field of a Megatron that nobody has tried yet is refused once it is set.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from l2r.engines.engine import selecting_as
from l2r.errors import InputError
from l2r.routers import Router
from l2r.routers.selection_rule import Selection


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MAPPED = _names("""
num_layers hidden_size num_attention_heads num_query_groups num_moe_experts moe_ffn_hidden_size
layernorm_epsilon moe_router_topk moe_router_score_function moe_router_pre_softmax
moe_router_topk_scaling_factor moe_router_enable_expert_bias
""")

FREE = {
    "communication": """
        pipeline_model_parallel_comm_backend hierarchical_context_parallel_sizes
        max_seqlen_per_dp_cp_rank timers finalize_model_grads_func grad_scale_func
        moe_grad_scale_func mtp_grad_scale_func no_sync_func grad_sync_func param_sync_func
        tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs
        tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs
        tp_comm_atomic_rs tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1
        tp_comm_bootstrap_backend async_tensor_model_parallel_allreduce
        overlap_moe_expert_parallel_comm overlap_dispatch_backward_with_experts_wgrad
        ep_overlap_early_attn_memory_release pipeline_dtype variable_seq_lengths overlap_p2p_comm
        batch_p2p_comm batch_p2p_sync use_ring_exchange_p2p deallocate_pipeline_outputs
        overlap_p2p_comm_warmup_flush microbatch_group_size_per_vp_stage
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        barrier_with_L1_time cp_comm_type moe_token_dispatcher_type moe_enable_deepep
        moe_flex_dispatcher_backend moe_permute_fusion_into_hybridep
        moe_hybridep_pad_uneven_dispatch_inputs moe_flex_dispatcher_num_sms moe_deepep_num_sms
        moe_hybridep_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_hybridep_num_sms_preprocessing moe_ncclep_static_shape moe_ncclep_zero_copy
        high_priority_a2a_comm_stream symmetric_ar_type nccl_all_reduce_for_prefill
    """,
    "memory": """
        use_cpu_initialization cpu_offloading cpu_offloading_num_layers _cpu_offloading_context
        cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering
        cpu_offloading_retain_pinned_cpu_buffers recompute_granularity recompute_method
        recompute_num_layers distribute_saved_activations recompute_modules moe_layer_recompute
        num_microbatches_with_partial_activation_checkpoints fine_grained_activation_offloading
        offload_modules min_offloaded_tensor_size delay_offload_until_cuda_graph
        delta_offload_bytes_across_pp_ranks activation_offload_fraction moe_paged_stash
        moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cuda
        moe_paged_stash_buffer_size_factor_cpu fine_grained_offloading_max_inflight_offloads
        clone_scatter_output_in_embedding memory_efficient_layer_norm persist_layer_norm
        activation_func_fp8_input_store hetereogenous_dist_checkpoint
    """,
    "initial weights": """
        perform_initialization init_method output_layer_init_method init_method_std
        embedding_init_method embedding_init_method_std init_model_with_meta_device
        use_te_rng_tracker inference_rng_tracker inference_sampling_seed is_hybrid_model
    """,
    "training alone": """
        hidden_dropout attention_dropout gradient_accumulation_fusion cross_entropy_loss_fusion
        cross_entropy_fusion_impl delay_wgrad_compute defer_embedding_wgrad_compute
        wgrad_deferral_limit calculate_per_token_loss moe_aux_loss_coeff moe_z_loss_coeff
        moe_per_layer_logging moe_router_bias_update_rate moe_router_quantile_balancing_ema
        mtp_loss_scaling_factor qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit
        config_logger_dir deterministic_mode moe_enable_routing_replay
    """,
    "the same numbers by another kernel, or in another dtype": """
        fp16 bf16 params_dtype enable_autocast autocast_dtype fp32_residual_connection
        attention_softmax_in_fp32 apply_query_key_layer_scaling
        disable_bf16_reduced_precision_matmul bias_activation_fusion masked_softmax_fusion
        bias_dropout_fusion apply_rope_fusion fused_single_qkv_rope fused_residual_rmsnorm
        use_transformer_engine_op_fuser attention_backend flash_attention_version moe_router_dtype
        moe_grouped_gemm use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert
        moe_permute_fusion moe_router_fusion flash_decode batch_invariant_mode
        use_te_activation_func use_fused_weighted_squared_relu transformer_impl enable_cuda_graph
        external_cuda_graph cuda_graph_impl cuda_graph_modules cuda_graph_scope
        inference_cuda_graph_scope cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
        cuda_graph_warmup_steps inference_fuse_tp_communication
        inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
        inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
        moe_pad_experts_for_cuda_graph_inference mlp_chunks_for_prefill mlp_chunks_for_training
        disable_parameter_transpose_cache
    """,
    "decided by the spec": "qk_layernorm",
    "read with another setting, which is refused": """
        ffn_hidden_size fp8_recipe fp8_margin fp8_interval fp8_amax_history_len
        fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention fp8_multi_head_attention
        tp_only_amax_red first_last_layers_bf16 num_layers_at_start_in_bf16
        num_layers_at_end_in_bf16 fp4_recipe kitchen_attention_backend window_attn_skip_freq
        moe_token_drop_policy moe_shared_expert_overlap moe_router_group_topk mup_width_mult
        mup_base_hidden_size mup_base_head_dim mup_attn_scale_power mup_embedding_mult
        mup_output_mult mtp_use_repeated_layer mtp_detach_heads mtp_hybrid_override_pattern
        mrope_section mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads
        mamba_training_ssm_states_dtype use_mamba_mem_eff_path linear_conv_kernel_dim
        linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
        dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk dsa_indexer_topk_freq
        dsa_indexer_skip_topk_offset dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss
        dsa_kernel_backend dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
        dsa_indexer_scoring_relu dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32
        experimental_attention_variant_loss_scale_func
    """,
}
_FREE = {name for names in FREE.values() for name in _names(names)}

# What an OLMoE has where it is not Megatron's default.
FIXED = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": nn.functional.silu,
    "add_bias_linear": False,
    "expert_tensor_parallel_size": 1,
}

# Arguments of GPTModel and HybridModel, which stand in the model and not in its configuration.
MODEL_MAPPED = _names("""
self config transformer_layer_spec hybrid_stack_spec hybrid_layer_pattern vocab_size
max_sequence_length rotary_base rope_scaling rope_scaling_factor seq_len_interpolation_factor
share_embeddings_and_output_weights
""")
MODEL_FREE = _names("""
fp16_lm_cross_entropy parallel_output scatter_embedding_sequence_parallel pg_collection vp_stage
hybrid_attention_ratio hybrid_mlp_ratio hybrid_override_pattern
""")
MODEL_FIXED = {
    "pre_process": True,
    "post_process": True,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "mtp_block_spec": None,
}

_SIGMOID = "moe_router_score_function='sigmoid' and {'kind': 'sigmoid'}"
_BALANCED = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
_SIGMOID = "moe_router_score_function='sigmoid' and {'kind': 'sigmoid'}"
_ONE_RANK = "load the checkpoint into a model of one rank"
# What has an export in place of a setting.
_INSTEAD = {
    "moe_expert_capacity_factor": "the folder drops no token: train without it, or export a model "
    "without it",
    "moe_input_jitter_eps": "export a model without it",
    "moe_router_load_balancing_type": f"moe_router_enable_expert_bias has one too, with {_SIGMOID}",
    "fp8": "load the checkpoint into a model without it",
    "fp4": "load the checkpoint into a model without it",
    "mtp_num_layers": "load the checkpoint into a model without it",
    "mtp_block_spec": "load the checkpoint into a model without it",
}
_INSTEAD_OF_SELECTION = {
    "moe_router_score_function": "'sigmoid' has one with {'kind': 'sigmoid'}",
    "moe_router_topk_scaling_factor": f"any value has one with {_SIGMOID}",
    "moe_router_enable_expert_bias": f"True has one with {_SIGMOID}",
}
# Where weights lie, which is no matter of the training.
_OF_RANKS = _names("""
tensor_model_parallel_size pipeline_model_parallel_size virtual_pipeline_model_parallel_size
pipeline_model_parallel_layout context_parallel_size expert_model_parallel_size
expert_tensor_parallel_size sequence_parallel hybrid_context_parallel gtp_weight_remat_size
expert_gtp_weight_remat_size tensor_parallel_num_weight_shards
expert_tensor_parallel_num_weight_shards mtp_standalone pre_process post_process
""")


def selection_rule(config: Any) -> Selection:
    """Rule by which Megatron chooses experts from logits, where one of our routers has it too."""
    softmax = config.moe_router_score_function == "softmax"
    return Selection(
        gate=config.moe_router_score_function,
        normalize=not config.moe_router_pre_softmax if softmax else config.moe_router_topk > 1,
        scale=config.moe_router_topk_scaling_factor or 1.0,
        bias="expert_bias" if config.moe_router_enable_expert_bias else None,
    )


def fields_without_export(config: Any, router: Router) -> list[str]:
    """Return a line for each field of a training with ``router`` that has no export."""
    return [line for name, line in _of_config(config, router) if name not in _OF_RANKS]


def arguments_without_export(model: Any) -> list[str]:
    """Return a line for each argument of a model, or of its part on a rank, that has no export."""
    lines = [line for name, line in _of_model(model) if name not in _OF_RANKS]
    if not lines and hasattr(model, "rotary_pos_emb"):
        try:
            rope_parameters(model)
        except InputError as error:
            lines.append(str(error))
    return lines


def check_exportable(model: Any, router: Router) -> None:
    """Raise InputError for the first setting of a model, or of its ranks, without an export."""
    for _, line in (*_of_model(model), *_of_config(model.config, router)):
        raise InputError(line)


def rope_parameters(model: Any) -> dict[str, Any]:
    """Return a configuration's rope_parameters. Raises InputError if Hugging Face has none so."""
    rotary = model.rotary_pos_emb
    found = rotary.inv_freq.double().cpu()
    size = 2 * len(found)
    if size != model.config.kv_channels:  # HybridModel keeps no rotary_percent
        raise InputError(_line("rotary_percent", size / model.config.kv_channels, 1.0))
    halves = torch.arange(0, size, 2, dtype=torch.float64) / size
    # HybridModel keeps no base, and a configuration may have one that is not read.
    base = float(getattr(model, "rotary_base", 0)) or _base_of(found)
    scaled, stretch = getattr(model, "rotary_scaling", False), rotary.seq_len_interpolation_factor
    if not scaled and not torch.allclose(base**-halves, found, rtol=1e-5):
        base = _base_of(found)
    if scaled and stretch is not None:
        raise InputError(
            "seq_len_interpolation_factor must be None beside rope_scaling for an export to "
            f"Hugging Face; got seq_len_interpolation_factor={stretch}"
        )
    if scaled:
        # Megatron's numbers, but for the factor: that of the slowest frequency.
        return {
            "rope_type": "llama3",
            "rope_theta": base,
            "factor": float((base**-halves / found).max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    if stretch is not None:
        return {"rope_type": "linear", "rope_theta": base, "factor": float(stretch)}
    return {"rope_type": "default", "rope_theta": base}


def _base_of(frequencies: torch.Tensor) -> float:
    size = 2 * len(frequencies)
    base = float(frequencies[-1]) ** (-size / (size - 2))
    # Frequencies are in fp32, most bases whole numbers.
    return round(base) if abs(base - round(base)) < 1e-6 * base else base


def _of_model(model: Any) -> Iterator[tuple[str, str]]:
    arguments = inspect.signature(type(model).__init__).parameters
    known = {*MODEL_MAPPED, *MODEL_FREE, *MODEL_FIXED}
    others = {n: a.default for n, a in arguments.items() if n not in known}
    for name, wanted in (MODEL_FIXED | others).items():
        value = getattr(model, name, wanted)
        if not _equal(value, wanted):
            yield name, _line(name, value, wanted)


def _of_config(config: Any, router: Router) -> Iterator[tuple[str, str]]:
    derived = {"kv_channels": config.hidden_size // config.num_attention_heads}
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if name in MAPPED or name in _FREE:
            continue
        if name == "moe_router_load_balancing_type":
            kinds = [value] if isinstance(value, str) else value
            if not set(kinds) <= set(_BALANCED):
                yield name, _line(name, value, f"of {', '.join(_BALANCED)}")
        elif name == "moe_layer_freq" and isinstance(value, list):
            if set(value) != {1}:
                yield name, _line(name, value, 1)
        else:
            wanted = (derived | FIXED).get(name, _default(field))
            if not _equal(value, wanted):
                yield name, _line(name, value, wanted)
    try:
        selecting_as(router, selection_rule(config))
    except InputError as error:
        # Most routers score by softmax; the sigmoid router takes any factor, and a bias.
        gate = router.selection.gate
        wanted = {"moe_router_score_function": gate}
        if gate == "softmax":
            wanted |= {
                "moe_router_topk_scaling_factor": None,
                "moe_router_enable_expert_bias": False,
            }
        wrong = {n: w for n, w in wanted.items() if not _equal(getattr(config, n), w)}
        for name, value in wrong.items():
            line = _line(name, getattr(config, name), f"{value} with a {router.config.kind} router")
            yield name, f"{line}; {_INSTEAD_OF_SELECTION[name]}"
        if not wrong:
            yield "moe_router_score_function", str(error)


def _line(name: str, value: Any, wanted: Any) -> str:
    said = _INSTEAD.get(name, _ONE_RANK if name in _OF_RANKS else "")
    wanted, value = (getattr(v, "__name__", v) for v in (wanted, value))
    line = f"{name} must be {wanted} for an export to Hugging Face; got {name}={value}"
    return f"{line}; {said}" if said else line


def _default(field: Any) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _equal(value: Any, wanted: Any) -> bool:
    return value is wanted or bool(value == wanted)
