"""Small torchtitan layers with our gates, made as its command line makes them."""

import dataclasses
import warnings

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan has an environment of its own: make engines")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchtitan.config import Configurable
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import (
        make_moe_config,
        make_routed_experts_config,
        make_router_config,
    )
    from torchtitan.models.common.embedding import Embedding
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.rope import CosSinRoPE
    from torchtitan.models.qwen3 import _build_qwen3_moe_layers, _qwen3_norm
    from torchtitan.models.qwen3.model import Qwen3Model

WIDTH, EXPERTS, TOP_K = 32, 4, 2
TARGET = "l2r.engines.torchtitan.l2r_gate"
X = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))
UP = torch.randn(2, 8, EXPERTS, generator=torch.Generator().manual_seed(2))


def normal(weight):
    torch.nn.init.normal_(weight, std=0.02)


@dataclasses.dataclass(kw_only=True, slots=True)
class Root(Configurable.Config):
    """A configuration whose modules are named as in a model."""

    moe: object = None


def configuration(router, *, shard=None, **fields):
    """One MoE layer, its gate replaced as a user of the command line replaces it.

    ``shard`` writes layouts into the configuration, which torchtitan does before it overrides.
    """
    experts = {"w1_EFD": normal, "w2_EDF": normal, "w3_EFD": normal}
    config = make_moe_config(
        num_experts=EXPERTS,
        router=make_router_config(
            dim=WIDTH,
            num_experts=EXPERTS,
            gate_param_init={"weight": normal},
            top_k=TOP_K,
            score_func="softmax",
            **fields,
        ),
        routed_experts=make_routed_experts_config(
            dim=WIDTH,
            hidden_dim=16,
            num_experts=EXPERTS,
            top_k=TOP_K,
            param_init=experts,
            comm_backend="standard",
        ),
    )
    if shard is not None:
        shard(config)
    root = Root(moe=Root(moe=config))
    (line,) = apply_overrides(OverrideConfig(imports=[(TARGET, router)]), root)
    assert "moe.moe.router.gate" in line
    return config


def built(router, **fields):
    torch.manual_seed(0)
    layer = configuration(router, **fields).build()
    layer.init_states()
    return layer


def qwen3_configuration(
    router,
    *,
    vocabulary=72,  # no other size is 72
    dim=WIDTH,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    hidden=16,
    experts=EXPERTS,
    top_k=TOP_K,
    positions=64,
    theta=1e4,
    tied=False,
    fused=False,
    flex=False,
):
    """A small Qwen3-MoE of torchtitan with our gates; without ``flex`` its attention is SDPA.

    FlexAttention is compiled, and has no backward on a CPU.
    """
    config = Qwen3Model.Config(
        vocab_size=vocabulary,
        dim=dim,
        norm=_qwen3_norm(dim),
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=dim, param_init={"weight": normal}
        ),
        lm_head=Linear.Config(
            in_features=dim, out_features=vocabulary, param_init={"weight": normal}
        ),
        layers=_build_qwen3_moe_layers(
            n_layers=layers, dim=dim, n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim,
            moe_hidden_dim=hidden, num_experts=experts, top_k=top_k, fuse_qkv=fused,
            attn_backend="flex", moe_comm_backend="standard",
            rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=positions, theta=theta),
        ),
    )  # fmt: skip
    if not flex:
        for layer in config.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    lines = apply_overrides(OverrideConfig(imports=[(TARGET, router)]), config)
    assert len(lines) == layers
    return config


def scaled(config):
    """The model of a configuration with random weights of order one in every product.

    With freshly drawn ones attention and experts hardly matter, which hides what is wrong.
    """
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    with torch.no_grad():
        for name, p in model.named_parameters():
            draws = torch.Generator().manual_seed(sum(map(ord, name)))
            value = torch.randn(p.shape, generator=draws)
            if "norm" in name:
                p.copy_(1 + 0.3 * value)
            elif p.dim() > 1:
                p.copy_(value * p.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias_E"):
                draws = torch.Generator().manual_seed(sum(map(ord, name)))
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=draws))
    return model.eval()
