"""Trained in OLMo-core: the Hugging Face folder gives the same logits and our commands read it."""

import pytest
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from l2r.errors import InputError
from l2r.routers import RouterConfig
from tests.checkpoints import small_tokenizer
from tests.engines.engines import (
    SIPS,
    assert_close,
    check_checkpoint,
    next_token_loss,
    periodic,
)

from .models import EXPERTS, LAYERS, TOP_K, VOCABULARY, WIDTH, configuration, small

from olmo_core.nn.moe.mlp import MoEMLP  # isort: skip
from olmo_core.nn.moe.router import MoERouterConfig  # isort: skip
from olmo_core.nn.transformer import (  # isort: skip
    TransformerActivationCheckpointingMode,
    TransformerConfig,
)

from l2r.engines.olmo_core import L2RRouterConfig  # isort: skip
from l2r.engines.olmo_core.checkpoint import load_hugging_face, to_hugging_face  # isort: skip
from l2r.engines.olmo_core.settings import blocks_of  # isort: skip

__all__ = ["small_tokenizer"]
pytestmark = pytest.mark.filterwarnings("ignore:Grouped GEMM not available")


@pytest.mark.engine("olmo-core", "train step")
@pytest.mark.engine("olmo-core", "checkpoint to HF")
@pytest.mark.parametrize("reordered_norm", [False, True])
def test_a_trained_model_is_a_checkpoint_of_ours(
    reordered_norm, small_tokenizer, tmp_path, l2r, text_folder
):
    size = len(small_tokenizer)
    _, model = small(SIPS, reordered_norm=reordered_norm, vocabulary=size)
    steps = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(20):
        ids = periodic(8, 16, size, seed=step)
        loss = next_token_loss(model(ids), ids)
        loss.backward()
        steps.step()
        steps.zero_grad()
        model.post_batch()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5, losses
    ids = periodic(2, 16, size, seed=99)
    with torch.no_grad():
        logits = model.eval()(ids)
    made = to_hugging_face(model, max_position_embeddings=256)
    assert type(made).__name__ == ("L2rFlexOlmo" if reordered_norm else "L2rOlmoe") + "ForCausalLM"
    check_checkpoint(made, ids, logits, small_tokenizer, tmp_path / "out", l2r, text_folder)

    _, other = small(SIPS, reordered_norm=reordered_norm, vocabulary=size)
    load_hugging_face(other, made)
    assert_equal_states(other, model)


def assert_equal_states(found, expected):
    expected = expected.state_dict()
    for name, value in found.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_wrapped_modules_are_exported_as_others():
    """Activation checkpointing puts a module around each; OLMo-core wraps no whole MoE block."""
    _, model = small(SIPS)
    plain = to_hugging_face(model, max_position_embeddings=64)
    model.apply_activation_checkpointing(
        TransformerActivationCheckpointingMode.selected_modules, modules=["blocks.*.attention"]
    )
    assert "_checkpoint_wrapped_module" in "".join(name for name, _ in model.named_modules())
    wrapped = to_hugging_face(model, max_position_embeddings=64).state_dict()
    assert all(torch.equal(value, wrapped[name]) for name, value in plain.state_dict().items())
    blocks_of(model)[1].attention._checkpoint_wrapped_module.clip_qkv = 1.0
    with pytest.raises(InputError, match=r"^block\.attention\.clip_qkv must be None"):
        to_hugging_face(model, max_position_embeddings=64)


def stock(folder, **fields):
    """A stock OLMoE of Hugging Face, saved and opened again."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    }
    ids = dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"))
    torch.manual_seed(1)
    model = OlmoeForCausalLM(OlmoeConfig(**sizes | ids | fields))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" not in name:
                p.mul_(5)
    model.save_pretrained(folder)
    return OlmoeForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("ours", [True, False], ids=["our linear", "the engine's linear"])
def test_a_stock_olmoe_goes_into_the_engine_and_back(ours, tmp_path):
    source = stock(tmp_path)
    config = configuration({"kind": "linear"})
    if not ours:
        config.block.feed_forward_moe.router = MoERouterConfig(top_k=TOP_K)
    model = config.build()
    model.init_weights(device=torch.device("cpu"))
    load_hugging_face(model, source)
    ids = periodic(2, 16, VOCABULARY)
    with torch.no_grad():
        assert_close(model.eval()(ids), source(ids).logits)
    back = to_hugging_face(model, max_position_embeddings=64).state_dict()
    assert back.keys() == source.state_dict().keys()
    for name, value in source.state_dict().items():
        assert torch.equal(value, back[name]), name


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
        {"rms_norm_eps": 1e-6},
        {"clip_qkv": 8.0},
        {"norm_topk_prob": True},
        {"hidden_act": "gelu"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_stock_olmoe_of_other_settings_is_refused_before_anything_is_copied(fields, tmp_path):
    _, model = small({"kind": "linear"})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match=f"must have the same {next(iter(fields))}; got "):
        load_hugging_face(model, stock(tmp_path, **fields))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("other", [{**SIPS, "kind": "l2r_dot"}, {**SIPS, "gamma": 2.0}])
def test_routers_that_score_otherwise_are_refused_before_anything_is_copied(other):
    """Their tensors are equal."""
    _, model = small(SIPS)
    source = to_hugging_face(small(other)[1], max_position_embeddings=64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match="both models must have the same router; got "):
        load_hugging_face(model, source)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_experts_with_a_capacity_are_stored_the_other_way_round():
    """OLMo-core keeps them [N D, F] for its batched product."""
    _, model = small({"kind": "linear"}, dropless=False)
    with pytest.raises(InputError, match=r"capacity_factor must be >= .* 2 .* got 1\.2"):
        to_hugging_face(model)
    for block in model.blocks.values():
        block.experts.capacity_factor = EXPERTS / TOP_K
    mlp = model.blocks["0"].feed_forward_moe.experts.mlp
    assert isinstance(mlp, MoEMLP)
    x = torch.randn(EXPERTS, 5, WIDTH)
    experts = to_hugging_face(model, max_position_embeddings=64).model.layers[0].mlp.experts
    every = torch.arange(EXPERTS).repeat_interleave(5).unsqueeze(1)
    ours = experts(x.flatten(0, 1), every, torch.ones(5 * EXPERTS, 1))
    assert_close(mlp(x).flatten(0, 1), ours)


def test_sigmoid_with_a_selection_bias_keeps_it():
    _, model = small(
        {"kind": "sigmoid"}, gating_function="sigmoid", normalize_expert_weights=1.0, bias_gamma=0.1
    )
    for _ in range(3):
        ids = periodic(4, 16, VOCABULARY)
        model(ids).sum().backward()
        model.post_batch()
    made = to_hugging_face(model, max_position_embeddings=64)
    bias = model.blocks["1"].feed_forward_moe.router.score_bias
    assert bias.abs().max() > 0
    assert torch.equal(made.model.layers[1].mlp.gate.e_score_correction_bias, bias)
    with torch.no_grad():
        # The engine adds 1e-7 to every score before it normalizes two that sum to about 1.
        assert_close(model.eval()(ids), made(ids).logits)


def test_a_balancing_bias_is_exported_with_every_router():
    _, model = small(SIPS, bias_gamma=0.1)
    for block in model.blocks.values():
        block.router.score_bias.copy_(torch.tensor([0.3, -0.3, 0.0, 0.1]))
    made = to_hugging_face(model, max_position_embeddings=64)
    assert made.config.router["selection_bias"]
    ids = periodic(2, 16, VOCABULARY)
    with torch.no_grad():
        assert_close(model.eval()(ids), made(ids).logits)
    _, other = small(SIPS, bias_gamma=0.1)
    load_hugging_face(other, made)
    assert_equal_states(other, model)
    _, without = small(SIPS)
    with pytest.raises(InputError, match="the engine's routers have none"):
        load_hugging_face(without, made)
    load_hugging_face(other, to_hugging_face(without, max_position_embeddings=64))
    assert not other.blocks["0"].router.score_bias.any()


def test_normalization_is_the_engines():
    _, model = small({"kind": "attention"}, normalize_expert_weights=1.0)
    made = to_hugging_face(model, max_position_embeddings=64)
    assert made.config.router["normalize_weights"]
    _, model = small({"kind": "attention"})
    made = to_hugging_face(model, max_position_embeddings=64)
    assert not made.config.router["normalize_weights"]


def test_the_configuration_survives_yaml_and_counts_its_parameters():
    config, model = small({"kind": "l2r_sips", "rank": 3, "heads": 2})
    again = TransformerConfig.from_dict(config.as_config_dict())
    assert again == config and isinstance(again.block.feed_forward_moe.router, L2RRouterConfig)
    assert config.num_params == sum(p.numel() for p in model.parameters())


def test_initial_routers_are_ours_and_differ_between_layers():
    _, model = small(SIPS)
    first, second = (model.blocks[str(i)].feed_forward_moe.router for i in range(LAYERS))
    ours = to_hugging_face(model, max_position_embeddings=64)
    for layer in ours.model.layers:
        norms = layer.mlp.gate.anchors.norm(dim=-1)
        torch.testing.assert_close(norms, torch.ones_like(norms))
    assert not torch.equal(first.anchors, second.anchors)
    before = first.projection_weight.clone()
    model.init_weights(device=torch.device("cpu"))
    assert torch.equal(first.projection_weight, before)


@pytest.mark.parametrize("router", [SIPS, {"kind": "linear"}, {"kind": "mixture", "rank": 2}])
def test_the_seed_of_the_engine_gives_the_routers(router):
    """As it gives all other weights: on cpu and meta, whatever the common stream is at."""

    def routers(seed, init_device="cpu", common=0):
        config = configuration(router)
        config.init_seed = seed
        torch.manual_seed(common)
        model = config.build(init_device=init_device)
        model.init_weights(device=torch.device("cpu"))
        return [dict(block.router.named_parameters()) for block in model.blocks.values()]

    first = routers(3)
    for again in (routers(3), routers(3, "meta"), routers(3, common=8)):
        for layer, other in zip(first, again, strict=True):
            assert all(torch.equal(value, other[name]) for name, value in layer.items())
    for name, value in first[0].items():
        if value.std() > 0:
            assert not torch.equal(value, first[1][name])
            assert not torch.equal(value, routers(4)[0][name])


def test_a_router_that_must_be_constrained_is_refused():
    options = RouterConfig.from_dict({"kind": "xmoe", "anchor_norm": 1.5}).to_dict()
    with pytest.raises(ValueError, match="anchor_norm must be None in an engine"):
        L2RRouterConfig(top_k=TOP_K, router=options).build(WIDTH, EXPERTS)
