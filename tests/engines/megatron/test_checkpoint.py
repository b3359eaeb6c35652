"""Trained in Megatron: the Hugging Face folder gives the same logits and our commands read it."""

import copy

import pytest
import torch

from tests.engines.engines import (
    SIPS,
    assert_close,
    check_checkpoint,
    next_token_loss,
    periodic,
)
from tests.training.evaluation.conftest import small_tokenizer

from .models import VOCABULARY, forward, one_rank, small

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


def test_a_sigmoid_router_keeps_its_selection_bias_and_scale():
    model = small(
        {"kind": "sigmoid"},
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.5,
        moe_router_dtype="fp32",
    )
    for layer in model.decoder.layers:
        layer.mlp.router.expert_bias.normal_()
    made = to_hugging_face(model)
    assert made.config.router["scale"] == 2.5 and made.config.router["normalize_weights"]
    ids = periodic(2, 16, VOCABULARY)
    with torch.no_grad():
        assert_close(forward(model.eval(), ids), made(ids).logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_router_score_function": "sigmoid"}, "no l2r_sips router selects by itself"),
        ({"moe_router_topk_scaling_factor": 2.0}, "no l2r_sips router selects by itself"),
        ({"activation_func": torch.nn.functional.gelu}, "activation_func must be"),
        ({"rotary_interleaved": True}, "rotary_interleaved must be False"),
    ],
)
def test_what_the_checkpoint_would_not_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        to_hugging_face(small(SIPS, **changes))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("glu_linear_offset", 1.0),
        ("activation_func_clamp_value", 7.0),
        ("softmax_type", "off-by-one"),
        ("moe_apply_probs_on_input", True),
        ("no_rope_freq", [1, 0]),
        ("use_mup", True),
        ("moe_mlp_glu_interleave_size", 8),
    ],
)
def test_what_changes_the_model_and_none_of_its_tensors_is_refused(model, name, value, monkeypatch):
    changed = copy.copy(model.config)
    setattr(changed, name, value)
    monkeypatch.setattr(model, "config", changed)
    with pytest.raises(ValueError, match=f"{name} must be .* got {name}="):
        to_hugging_face(model)


def test_normalization_is_the_engines():
    """Softmax over the chosen experts alone is softmax over all, made to sum to 1."""
    model = small(SIPS, moe_router_pre_softmax=False)
    made = to_hugging_face(model)
    assert made.config.router["normalize_weights"]
    ids = periodic(2, 16, VOCABULARY)
    with torch.no_grad():
        assert_close(forward(model.eval(), ids), made(ids).logits)


@pytest.mark.parametrize("changes", [{"router": {**SIPS, "rank": 3}}, {"moe_ffn_hidden_size": 24}])
def test_a_model_of_other_sizes_is_refused_before_anything_is_copied(changes):
    model = small(SIPS)
    before = {n: p.clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        other = to_hugging_face(small(**{"router": SIPS, **changes}))
    with pytest.raises(ValueError, match="both models must have the same sizes"):
        load_hugging_face(model, other)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name


def test_another_router_or_attention_is_refused():
    with pytest.raises(ValueError, match="every layer must come from olmoe_layer; layer 0"):
        to_hugging_face(small(None))
