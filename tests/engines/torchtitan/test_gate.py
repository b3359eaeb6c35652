"""torchtitan's router with our gate chooses and weighs as ours; its Qwen3 checkpoints are ours."""

import dataclasses
import warnings

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from l2r import build_router, load_pretrained
from l2r.hf.swap import swap_routers
from l2r.routers import RouterConfig
from tests.engines.engines import ROUTERS, SIPS, assert_close

from .models import EXPERTS, TARGET, TOP_K, UP, WIDTH, X, built, normal

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.embedding import Embedding
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.rope import CosSinRoPE
    from torchtitan.models.qwen3 import _build_qwen3_moe_layers, _qwen3_norm
    from torchtitan.models.qwen3.model import Qwen3Model

    from l2r.engines.torchtitan import L2RQwen3StateDictAdapter

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype")


def ours_like(layer, router, **options):
    config = dataclasses.replace(RouterConfig.from_dict(router), **options)
    own = build_router(config, hidden_size=WIDTH, num_experts=EXPERTS, top_k=TOP_K)
    with torch.no_grad():
        for flat, name in layer.router.gate.plug.names.items():
            target = own.get_parameter(name)
            target.copy_(getattr(layer.router.gate, flat).view(target.shape))
    return own


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ROUTERS)
def test_the_router_weighs_and_learns_as_ours(kind, normalize):
    router = {"kind": kind, **ROUTERS[kind]}
    layer = built(router, route_norm=normalize)
    own = ours_like(layer, router, normalize_weights=normalize)
    scores, chosen, _ = layer.router(X)
    out = own(X)
    order = chosen.flatten(0, 1).argsort(-1)
    ours = out.indices.argsort(-1)
    assert torch.equal(chosen.flatten(0, 1).gather(1, order), out.indices.gather(1, ours))
    assert_close(scores.flatten(0, 1).gather(1, order), out.weights.gather(1, ours), "weights")
    (layer.router.gate(X) * UP).sum().backward()
    (out.logits * UP.flatten(0, 1)).sum().backward()
    for flat, name in layer.router.gate.plug.names.items():
        gradient = getattr(layer.router.gate, flat).grad
        expected = own.get_parameter(name).grad
        assert expected.abs().max() > 0
        assert_close(gradient.view(expected.shape), expected, name)


@pytest.mark.engine("torchtitan", "train step")
def test_a_layer_learns_and_its_bias_decides_with_our_logits():
    """Experts run in bf16, which torchtitan fixes; the layer is what runs on a CPU."""
    layer = built(SIPS)
    target = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(3))
    steps = torch.optim.AdamW(layer.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        loss = (layer(X) - target).square().mean()
        loss.backward()
        assert all(p.grad.abs().max() > 0 for p in layer.router.gate.parameters())
        steps.step()
        steps.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0], losses
    bias = torch.tensor([0.0, 0.0, 0.0, 9.0])
    assert (layer.router(X, bias)[1] == 3).any(-1).all()


def qwen3(**fields):
    """A tiny Qwen3-MoE of torchtitan with our gates, and its configuration."""
    config = Qwen3Model.Config(
        vocab_size=64,
        dim=WIDTH,
        norm=_qwen3_norm(WIDTH),
        tok_embeddings=Embedding.Config(
            num_embeddings=64, embedding_dim=WIDTH, param_init={"weight": normal}
        ),
        lm_head=Linear.Config(in_features=WIDTH, out_features=64, param_init={"weight": normal}),
        layers=_build_qwen3_moe_layers(
            n_layers=2, dim=WIDTH, n_heads=2, n_kv_heads=2, head_dim=16, moe_hidden_dim=16,
            num_experts=EXPERTS, top_k=TOP_K, fuse_qkv=False, attn_backend="flex",
            moe_comm_backend="standard", rope=CosSinRoPE.Config(dim=16, max_seq_len=64),
        ),
    )  # fmt: skip
    assert len(apply_overrides(OverrideConfig(imports=[(TARGET, SIPS)]), config)) == 2
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return config, model


@pytest.mark.engine("torchtitan", "checkpoint to HF")
def test_the_adapter_writes_and_reads_qwen3_with_our_routers(tmp_path):
    config, model = qwen3()
    adapter = L2RQwen3StateDictAdapter(config, None)
    state = {n: v for n, v in model.state_dict().items() if not n.endswith("expert_bias_E")}
    written = adapter.to_hf(dict(state))
    hf = Qwen3MoeConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, norm_topk_prob=True,
        tie_word_embeddings=False, pad_token_id=0, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, moe_intermediate_size=16,
    )  # fmt: skip
    swap_routers(Qwen3MoeForCausalLM(hf), RouterConfig.from_dict(SIPS)).save_pretrained(tmp_path)
    save_file({n: v.contiguous() for n, v in written.items()}, tmp_path / "model.safetensors")
    loaded = load_pretrained(tmp_path)  # every tensor must be there
    with torch.no_grad():
        for number, layer in enumerate(loaded.model.layers):
            theirs = model.layers[str(number)].moe.router
            scores, chosen, _ = theirs(X)
            out = layer.mlp.gate(X)
            order, ours = chosen.flatten(0, 1).argsort(-1), out.indices.argsort(-1)
            assert_close(scores.flatten(0, 1).gather(1, order), out.weights.gather(1, ours))
    again = adapter.from_hf(dict(written))
    assert again.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(again[name], value), name


def test_a_selection_bias_is_not_dropped_without_a_word():
    config, model = qwen3()
    adapter = L2RQwen3StateDictAdapter(config, None)
    adapter.to_hf(dict(model.state_dict()))
    model.layers["1"].moe.expert_bias_E[0] = 0.1
    with pytest.raises(ValueError, match="load_balance_coeff must be None"):
        adapter.to_hf(dict(model.state_dict()))
