"""Trained in Megatron: the Hugging Face folder gives the same logits and our commands read it."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import small_tokenizer
from tests.engines.engines import (
    SIPS,
    assert_close,
    check_checkpoint,
    next_token_loss,
    periodic,
)

from .models import EXPERTS, LAYERS, VOCABULARY, forward, one_rank, scale, small

from l2r.engines.olmoe_tensors import copy_all  # isort: skip
from l2r.engines.megatron.checkpoint import (  # isort: skip
    _pairs,
    load_hugging_face,
    to_hugging_face,
)

__all__ = ["small_tokenizer"]
pytestmark = pytest.mark.filterwarnings("ignore:::megatron")


@pytest.fixture(autouse=True, scope="module")
def _one_rank(tmp_path_factory):
    with one_rank(tmp_path_factory.mktemp("megatron")):
        yield


@pytest.fixture(scope="module")
def model(_one_rank):
    return small(SIPS)


def assert_equal_states(found, expected):
    expected = expected.state_dict()
    for name, value in found.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, expected[name]), name


@pytest.mark.engine("megatron", "train step")
@pytest.mark.engine("megatron", "checkpoint to HF")
def test_a_trained_model_is_a_checkpoint_of_ours(small_tokenizer, tmp_path, l2r, text_folder):
    size = len(small_tokenizer)
    model = small(SIPS, vocabulary=size)
    steps = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(20):
        ids = periodic(8, 16, size, seed=step)
        loss = next_token_loss(forward(model, ids), ids)
        loss.backward()
        steps.step()
        steps.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5, losses
    ids = periodic(2, 16, size, seed=99)
    with torch.no_grad():
        logits = forward(model.eval(), ids)
    made = to_hugging_face(model, max_position_embeddings=256)
    assert type(made).__name__ == "L2rOlmoeForCausalLM"
    check_checkpoint(made, ids, logits, small_tokenizer, tmp_path / "out", l2r, text_folder)

    other = small({"kind": "l2r_sips", "rank": 2, "heads": 4}, vocabulary=size)
    assert not torch.equal(other.output_layer.weight, model.output_layer.weight)
    load_hugging_face(other, made)
    assert_equal_states(other, model)


def test_the_names_of_transformer_engine_are_known():
    """Its layers keep the first norm inside the projection and experts side by side."""
    model = small(SIPS)
    made = to_hugging_face(model)
    renamed = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            continue
        other = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        if ".local_experts." in name:
            before, after = name.split(".local_experts.")
            expert, layer, _ = after.split(".")
            other = f"{before}.{layer}.weight{expert}"
        renamed[other] = 2 * value
    renamed["decoder.layers.0.self_attention.linear_qkv._extra_state"] = torch.zeros(3)
    copy_all(made, renamed, lambda ours, theirs: _pairs(model, ours, theirs))
    expected = to_hugging_face(model).state_dict()
    for name, value in made.state_dict().items():
        assert torch.equal(value, 2 * expected[name]), name


@pytest.mark.parametrize("own", [{}, {"selection_bias": False}])
def test_a_sigmoid_router_keeps_its_selection_bias_and_scale(own):
    model = small(
        {"kind": "sigmoid", **own},
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.5,
        moe_router_dtype="fp32",
    )
    for layer in model.decoder.layers:
        layer.mlp.router.expert_bias.normal_()
    made = to_hugging_face(model)
    assert made.config.router["scale"] == 2.5 and made.config.router["normalize_weights"]
    assert made.config.router["selection_bias"]
    ids = periodic(2, 16, VOCABULARY)
    with torch.no_grad():
        assert_close(forward(model.eval(), ids), made(ids).logits)
    for layer in model.decoder.layers:
        layer.mlp.router.expert_bias.zero_()
    load_hugging_face(model, made)
    for layer, ours in zip(model.decoder.layers, made.model.layers, strict=True):
        bias = layer.mlp.router.expert_bias
        assert bias.any() and torch.equal(bias, ours.mlp.gate.e_score_correction_bias)


def test_a_refused_export_says_what_to_set_and_copies_nothing():
    """Every other setting is in test_settings.py."""
    wrong = {"moe_router_score_function": "sigmoid"}
    message = "must be softmax with a l2r_sips router .* 'sigmoid' has one with {'kind': 'sigmoid'}"
    with pytest.raises(ValueError, match=message):
        to_hugging_face(small(SIPS, **wrong))


def test_an_export_that_would_differ_is_refused(monkeypatch):
    """What no setting tells, the proof sees: here a forward that somebody replaced."""
    model = small(SIPS)
    plain = model.forward
    monkeypatch.setattr(model, "forward", lambda *args: plain(*args) * 1.01)
    with pytest.raises(ValueError, match="a logit differs by"):
        to_hugging_face(model)


def test_positions_are_those_of_the_model_and_the_proof_covers_them(monkeypatch):
    model, seen = small(SIPS), []
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    assert to_hugging_face(model).config.max_position_embeddings == 64
    assert to_hugging_face(model, max_position_embeddings=96).config.max_position_embeddings == 96
    assert [shape[-1] for shape in seen] == [64, 96]


def test_tied_embeddings_are_exported_and_read_back(tmp_path):
    model = small(SIPS, arguments={"share_embeddings_and_output_weights": True})
    scale(model)
    made = to_hugging_face(model)
    made.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    ids = periodic(2, 16, VOCABULARY)
    with torch.no_grad():
        assert_close(forward(model.eval(), ids), loaded(ids).logits, room=1e-5)
    other = small(SIPS, arguments={"share_embeddings_and_output_weights": True})
    assert not torch.equal(other.shared_embedding_or_output_weight(), loaded.lm_head.weight)
    load_hugging_face(other, loaded)
    assert_equal_states(other, model)
    with pytest.raises(ValueError, match="share_embeddings_and_output_weights must be False"):
        load_hugging_face(other, to_hugging_face(small(SIPS)))


def test_every_tensor_of_a_checkpoint_arrives_and_experts_first_of_all():
    """Megatron-LM#5844: its converter left the experts as they were built, without a word."""
    source = to_hugging_face(scale(small(SIPS)))
    model = small(SIPS)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    load_hugging_face(model, source)
    assert sum(".experts." in name for name in before) == 2 * LAYERS * EXPERTS
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), name
    stacked = {n: v for n, v in model.state_dict().items() if ".local_experts." not in n}
    for layer in range(LAYERS):
        stacked[f"decoder.layers.{layer}.mlp.experts.weight1"] = torch.zeros(EXPERTS, 32, 32)
    for to_engine in (True, False):
        with pytest.raises(ValueError, match=r"the engine must hold .*experts\."):
            copy_all(source, stacked, partial(_pairs, model), to_engine=to_engine)


def test_normalization_is_the_engines():
    """Softmax over the chosen experts alone is softmax over all, made to sum to 1."""
    model = small(SIPS, moe_router_pre_softmax=False)
    made = to_hugging_face(model)
    assert made.config.router["normalize_weights"]
    ids = periodic(2, 16, VOCABULARY)
    with torch.no_grad():
        assert_close(forward(model.eval(), ids), made(ids).logits)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"router": {**SIPS, "rank": 3}}, "router; got rank=3"),
        ({"router": {**SIPS, "gamma": 2.0}}, "router; got gamma=2.0"),
        ({"router": {**SIPS, "kind": "l2r_dot"}}, "router; got kind=l2r_dot"),
        ({"moe_router_pre_softmax": False}, "router; got normalize_weights=True"),
        ({"moe_ffn_hidden_size": 24}, "intermediate_size; got 24"),
        ({"moe_router_topk": 1}, "num_experts_per_tok; got 1"),
        ({"arguments": {"rotary_base": 500_000}}, "rope_parameters"),
        ({"layernorm_epsilon": 1e-6}, "rms_norm_eps; got 1e-06"),
    ],
)
def test_a_model_that_computes_otherwise_is_refused_before_anything_is_copied(changes, field):
    """Most have equal tensors, and other logits."""
    model = small(SIPS)
    before = {n: p.clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        other = to_hugging_face(small(**{"router": SIPS, **changes}))
    with pytest.raises(ValueError, match=f"both models must have the same {field}"):
        load_hugging_face(model, other)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name


def test_another_router_or_attention_is_refused():
    with pytest.raises(ValueError, match="every layer must come from olmoe_layer; layer 0"):
        to_hugging_face(small(None))
