"""Small OLMo-core models on a CPU, where its two Triton operations are written in torch."""

import pytest
import torch

pytest.importorskip("olmo_core", reason="OLMo-core has an environment of its own: make engines")

import olmo_core.ops.moe as ops
from olmo_core.nn.transformer import TransformerConfig

from l2r.engines.olmo_core import L2RRouterConfig

VOCABULARY, LAYERS, EXPERTS, TOP_K, WIDTH = 60, 2, 4, 2, 32
WEIGHTS = {"lb_loss_weight": 0.05, "z_loss_weight": 0.01}


def gather(x, indices, bin_ids, bins, top_k):
    return x[indices.long() // top_k]


def scatter(x, indices, bin_ids, weights, bins, top_k):
    back = torch.empty_like(x).index_copy(0, indices.long(), x)
    if weights is not None:
        back = (back * weights.unsqueeze(-1)).to(x.dtype)
    return back.view(-1, top_k, x.shape[-1]).sum(1)


def places(indices, bins, bin_size):
    """For each expert the places in ``indices`` of the tokens within its capacity."""
    starts = torch.cat([bins.new_zeros(1), bins[:-1]])
    return [
        range(int(a), min(int(a) + bin_size, int(b))) for a, b in zip(starts, bins, strict=True)
    ]


def binned_gather(x, indices, bins, bin_size, top_k):
    out = x.new_zeros(len(bins), bin_size, x.shape[1])
    for expert, rows in enumerate(places(indices, bins, bin_size)):
        out[expert, : len(rows)] = x[indices[list(rows)].long() // top_k]
    return out


def binned_scatter(x, indices, weights, bins, top_k):
    back = x.new_zeros(len(indices), x.shape[-1])
    for expert, rows in enumerate(places(indices, bins, x.shape[1])):
        back[indices[list(rows)].long()] = x[expert, : len(rows)]
    if weights is not None:
        back = (back * weights.unsqueeze(-1)).to(x.dtype)
    return back.view(-1, top_k, x.shape[-1]).sum(1)


def on_cpu():
    ops.gather, ops.scatter = gather, scatter
    ops.binned_gather, ops.binned_scatter = binned_gather, binned_scatter


def configuration(
    router,
    *,
    reordered_norm=False,
    granularity=None,
    vocabulary=VOCABULARY,
    dropless=True,
    **fields,
):
    """Configuration of a small model with a router of ours; ``fields`` are the router's."""
    config = TransformerConfig.llama_like_moe(
        d_model=WIDTH,
        vocab_size=vocabulary,
        n_layers=LAYERS,
        n_heads=2,
        num_experts=EXPERTS,
        top_k=TOP_K,
        expert_hidden_size=16,
        dropless=dropless,
        reordered_norm=reordered_norm,
        qk_norm=True,
        **WEIGHTS,
    )
    config.block.feed_forward_moe.router = L2RRouterConfig(top_k=TOP_K, router=router, **fields)
    if granularity is not None:
        config.block.feed_forward_moe.lb_loss_granularity = granularity
    return config


def small(router, *, init_device="cpu", **fields):
    """Configuration and model, seeded."""
    on_cpu()
    config = configuration(router, **fields)
    torch.manual_seed(0)
    model = config.build(init_device=init_device)
    model.init_weights(device=torch.device("cpu"))
    return config, model
