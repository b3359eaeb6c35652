"""Each setting of OLMo-core: the folder equals the engine's model, or the setting is refused."""

import dataclasses
import warnings

import pytest
import torch

from tests.engines.engines import SIPS

from . import walk
from .models import configuration, on_cpu, small

from l2r.engines.olmo_core import settings  # isort: skip
from l2r.engines.olmo_core.checkpoint import to_hugging_face  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore:Grouped GEMM not available")
# Sums of some hundred numbers in fp32, through two layers whose weights are large.
ROOM = 1e-5
BY_THE_PROOF = "would not be the engine's"


@pytest.fixture(scope="module")
def rows():
    return list(walk.rows())


@pytest.mark.engine("olmo-core", "checkpoint to HF")
def test_every_setting_is_equal_or_refused_by_name_and_nothing_between(rows):
    for row in rows:
        if row.outcome == "equal" and row.value != "bfloat16 everywhere":
            assert row.difference < ROOM, row
        elif row.outcome == "refused":
            assert "must" in row.said and BY_THE_PROOF not in row.said, row
    shows = [row for row in rows if row.outcome != "engine" and (row.moved or 0) > 0.01]
    assert len(shows) >= 70
    assert {row.outcome for row in shows} == {"equal", "refused"}


def test_the_walk_knows_every_field_and_argument():
    for kind, values in walk.VALUES.items():
        assert set(values) == {field.name for field in dataclasses.fields(kind)}, kind
    left = {
        (module, name) for module, of in walk.MODULES.items() for name in walk.arguments(module, of)
    }
    assert left == set(walk.ARGUMENTS)


def test_what_is_said_to_have_no_effect_has_none(rows):
    fields = {name for name, why in settings.FREE.items() if "arithmetic" not in why}
    free = [row for row in rows if row.field in fields and row.outcome != "engine"]
    assert len({row.field for row in free}) >= 9
    for row in free:
        assert row.outcome == "equal" and row.moved < ROOM, row


def test_settings_that_were_exported_without_a_word_are_named(rows):
    refused = {(row.of, row.field): row.said for row in rows if row.outcome == "refused"}
    for of, field in (
        ("AttentionConfig", "clip_qkv"),
        ("RoPEConfig", "partial_rotary_factor"),
        ("AttentionConfig", "gate"),
        ("L2RRouterConfig", "uniform_expert_assignment"),
        ("L2RRouterConfig", "gating_function"),
    ):
        assert field in refused[of, field]
    exported = {row.field for row in rows if row.outcome == "equal" and (row.moved or 0) > 0.01}
    assert {"theta", "scaling", "bias_gamma", "normalize_expert_weights", "n_kv_heads"} <= exported
    assert "tie_word_embeddings" in exported


def test_a_field_that_a_newer_olmo_core_adds_is_refused_once_it_is_set():
    _, model = small(SIPS)
    for block in model.blocks.values():
        block.attention.brand_new = None
    to_hugging_face(model, max_position_embeddings=32)
    model.blocks["1"].attention.brand_new = True
    with pytest.raises(ValueError, match=r"block\.attention\.brand_new must be None .* got True"):
        to_hugging_face(model, max_position_embeddings=32)


def test_what_no_attribute_shows_is_refused_by_the_proof():
    model = walk.make()
    rope = model.blocks["1"].attention.rope
    plain = rope._rotate_half
    rope._rotate_half = lambda t: -plain(t)
    with pytest.raises(ValueError, match=rf"{BY_THE_PROOF}: at position \d+ of 32 a logit differs"):
        to_hugging_face(model, max_position_embeddings=32)


def test_the_plug_says_before_the_training_what_has_no_export():
    on_cpu()
    config = configuration({"kind": "linear"}, bias_gamma=0.1)
    config.block.sequence_mixer.clip_qkv = 0.3
    with pytest.warns(UserWarning, match=r"block\.attention\.clip_qkv must be None") as said:
        settings.plug(config, SIPS)
    assert len(said) == 1  # for both blocks, and for nothing else: a bias has an export
    router = config.block.feed_forward_moe.router
    assert (router.router, router.bias_gamma, router.top_k) == (SIPS, 0.1, 2)
    config.block.sequence_mixer.clip_qkv = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Grouped GEMM")
        model = settings.plug(config, SIPS).build()
    model.init_weights(device=torch.device("cpu"))
    assert to_hugging_face(model, max_position_embeddings=32) is not None


def test_a_router_says_it_when_it_is_built_alone():
    with pytest.warns(UserWarning, match=r"gating_function must be softmax .* l2r_sips .* sigmoid"):
        small(SIPS, gating_function="sigmoid")
    config = configuration(SIPS)
    config.block.feed_forward_moe = None
    config.block.name = "default"
    with pytest.raises(ValueError, match="a block must have feed_forward_moe"):
        settings.plug(config, SIPS)
