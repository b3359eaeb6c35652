"""HybridModel, which Megatron says takes the place of GPTModel: plugged, exported, read back."""

import dataclasses
import inspect
import warnings

import pytest
import torch

from tests.engines.engines import SIPS, assert_close, periodic

from .models import (
    ARGUMENTS,
    EXPERTS,
    VOCABULARY,
    configuration,
    forward,
    get_gpt_layer_local_spec,
    one_rank,
    scale,
)

pytest.importorskip("megatron.core.models.hybrid", reason="Megatron has one from 0.18 on")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Transformer Engine is not there
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from l2r.engines.megatron import (  # isort: skip
    L2RTopKRouter,
    moe_submodules,
    olmoe_layer,
    plug,
    settings,
)
from l2r.engines.megatron.checkpoint import load_hugging_face, to_hugging_face  # isort: skip
from l2r.engines.megatron.routes import record  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True, scope="module")
def _one_rank(tmp_path_factory):
    with one_rank(tmp_path_factory.mktemp("megatron")):
        yield


def build(monkeypatch, pattern="*E*E", **changes):
    """Its stack without Transformer Engine, which a CPU does not have."""
    layer = get_gpt_layer_local_spec(
        num_experts=EXPERTS, qk_layernorm=True, normalization="RMSNorm"
    )
    parts, norm = layer.submodules, layer.submodules.input_layernorm
    attention = TransformerLayerSubmodules(
        input_layernorm=norm, self_attention=parts.self_attention, self_attn_bda=parts.self_attn_bda
    )
    experts = TransformerLayerSubmodules(
        pre_mlp_layernorm=norm, mlp=parts.mlp, mlp_bda=parts.mlp_bda
    )
    theirs = hybrid_stack_spec.submodules
    layers = {
        "attention_layer": ModuleSpec(theirs.attention_layer.module, submodules=attention),
        "moe_layer": ModuleSpec(theirs.moe_layer.module, submodules=experts),
    }
    stack = dataclasses.replace(theirs, **layers)
    spec = ModuleSpec(hybrid_stack_spec.module, submodules=stack)
    olmoe_layer(spec, SIPS)
    monkeypatch.setattr(hybrid_block, "TENorm", norm)
    config = configuration(num_layers=len(pattern), is_hybrid_model=True)
    arguments = {"vocab_size": VOCABULARY, "hybrid_layer_pattern": pattern, **ARGUMENTS, **changes}
    return scale(HybridModel(config, spec, **arguments))


def test_megatrons_own_stack_takes_our_router(monkeypatch):
    experts = moe_submodules(hybrid_stack_spec.submodules.moe_layer)
    attention = hybrid_stack_spec.submodules.attention_layer.submodules.self_attention.submodules
    for owner, name in (
        (experts, "router"),
        (attention, "q_layernorm"),
        (attention, "k_layernorm"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # as it was, for the other tests
    assert plug(hybrid_stack_spec, SIPS) == 1
    assert experts.router.func is L2RTopKRouter
    olmoe_layer(hybrid_stack_spec, SIPS)
    assert attention.q_layernorm.module.__name__ == "HeadsNorm"


def test_an_olmoe_in_a_hybrid_stack_is_exported_and_read_back(monkeypatch):
    model = build(monkeypatch).eval()
    made = to_hugging_face(model)
    assert made.config.num_hidden_layers == 2
    ids = periodic(2, 16, VOCABULARY)
    with torch.no_grad(), record(model) as recorder:
        assert_close(forward(model, ids), made(ids).logits, room=1e-5)
    for called in (model, torch.nn.Sequential(model)):  # wrappers pass no attributes on
        with record(called) as recorder:
            fingerprint = recorder.fingerprint
        assert (fingerprint.layers, fingerprint.hidden_layers) == ((0, 1), 2)
    other = build(monkeypatch)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    load_hugging_face(other, made)
    for name, p in other.named_parameters():
        assert torch.equal(p, model.get_parameter(name)), name


@pytest.mark.parametrize("pattern", ["EE**", "*E*", "*EE*"])
def test_layers_in_another_order_are_refused(monkeypatch, pattern):
    with pytest.raises(ValueError, match=r"hybrid_layer_pattern must be \*E for each layer"):
        to_hugging_face(build(monkeypatch, pattern))


def test_every_argument_is_known():
    known = {*settings.MODEL_MAPPED, *settings.MODEL_FREE, *settings.MODEL_FIXED}
    assert set(inspect.signature(HybridModel.__init__).parameters) <= known


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"rotary_base": 500_000}, ""),
        ({"seq_len_interpolation_factor": 2.0}, ""),
        ({"share_embeddings_and_output_weights": True}, ""),
        ({"rotary_percent": 0.5}, "rotary_percent must be 1.0"),
        ({"position_embedding_type": "none"}, "position_embedding_type must be rope"),
        ({"post_process": False}, "post_process must be True"),
    ],
)
def test_its_arguments_are_equal_or_refused(monkeypatch, changes, refused):
    ids = periodic(1, 64, VOCABULARY)
    plain, model = build(monkeypatch).eval(), build(monkeypatch, **changes).eval()
    if refused:
        with pytest.raises(ValueError, match=refused):
            to_hugging_face(model)
        return
    with torch.no_grad():
        logits = forward(model, ids)
        assert (logits - forward(plain, ids)).abs().max() > 0.01 * logits.abs().max()
        assert_close(to_hugging_face(model)(ids).logits, logits, room=1e-5)
