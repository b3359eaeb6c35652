"""Small Megatron-core models on a CPU, where a few calls that mean a GPU are replaced."""

import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="Megatron has an environment of its own: make engines")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Apex and Transformer Engine are not there
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import TransformerConfig, transformer_block
    from megatron.core.transformer.moe.router import TopKRouter

from l2r.engines.megatron import moe_submodules, olmoe_layer
from tests.engines.engines import SIPS

VOCABULARY, LAYERS, EXPERTS, TOP_K, WIDTH = 60, 2, 4, 2, 32
BALANCE, Z = 0.05, 0.01
ARGUMENTS = {
    "max_sequence_length": 64,
    "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False,
}


def on_cpu():
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda: None
    random.CudaRNGStatesTracker.fork = lambda self, name=None: nullcontext()
    random._get_cuda_rng_state = random._set_cuda_rng_state = lambda *args, **options: None


@contextmanager
def one_rank(folder):
    """A process group of one, which Megatron wants."""
    on_cpu()
    dist.init_process_group("gloo", init_method=f"file://{folder / 'one'}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def configuration(**changes):
    _tracked().clear()  # entries are as long as the model was deep that made them
    fields = {
        "num_layers": LAYERS,
        "hidden_size": WIDTH,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOP_K,
        "moe_ffn_hidden_size": 16,
        "ffn_hidden_size": 16,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": BALANCE,
        "moe_z_loss_coeff": Z,
        "moe_token_dispatcher_type": "allgather",
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "use_cpu_initialization": True,
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return TransformerConfig(**fields | changes)


def small(router, *, vocabulary=VOCABULARY, norm=None, arguments=None, seed=0, **changes):
    """A seeded GPTModel that is an OLMoE; without ``router``, one with Megatron's own."""
    config = configuration(**changes)
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, qk_layernorm=True, normalization="RMSNorm")
    olmoe_layer(spec, router or SIPS)
    if router is None:
        moe_submodules(spec).router = TopKRouter
    if norm is not None:
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = norm
        transformer_block.LayerNormImpl = norm
    torch.manual_seed(seed)
    return GPTModel(config, spec, **{"vocab_size": vocabulary} | ARGUMENTS | (arguments or {}))


def scale(model):
    """Draw all weights anew by name and shape, large enough for every part to matter."""
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
            if "norm" in name:
                p.copy_(1 + 0.2 * drawn)
            elif p.ndim > 1:
                p.copy_(drawn * (0.5 if "embedding" in name else 2 / p.shape[-1] ** 0.5))
            else:
                p.copy_(drawn)
    return model


def _tracked():
    """Megatron's entries by the name of a loss."""
    try:
        from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
    except ImportError:  # before 0.18
        from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

        return get_moe_layer_wise_logging_tracker()
    return get_moe_metrics_tracker().metrics


def logged_losses():
    """Losses that the routers logged since the last call, by name, one entry a layer."""
    entries = _tracked().items()
    found = {
        n: entry["values"] if isinstance(entry, dict) else entry.values for n, entry in entries
    }
    _tracked().clear()
    return found


def forward(model, ids):
    """Logits [B, S, V]."""
    rows, length = ids.shape
    places = torch.arange(length).expand(rows, length)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    return model(ids, places, mask)
