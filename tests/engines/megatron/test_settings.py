"""Each setting of Megatron: the folder equals the engine's model, or the setting is refused."""

import contextlib
import dataclasses
import warnings

import pytest
import torch
from torch import nn

from tests.engines.engines import SIPS

from . import walk
from .models import TransformerConfig, configuration, one_rank, small

from l2r.engines.megatron import settings  # isort: skip
from l2r.engines.megatron.checkpoint import to_hugging_face, without_export  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore")
# Sums of some hundred numbers in fp32, through two layers whose weights are large.
ROOM = 1e-5
# Each changes what is rounded, not what is computed.
DTYPES = {"fp16", "bf16", "params_dtype"}


@pytest.fixture(autouse=True, scope="module")
def _one_rank(tmp_path_factory):
    with one_rank(tmp_path_factory.mktemp("megatron")):
        yield


@pytest.fixture(scope="module")
def rows(_one_rank, tmp_path_factory):
    with contextlib.chdir(tmp_path_factory.mktemp("walk")):  # for config_logger_dir
        return list(walk.rows())


@pytest.mark.engine("megatron", "checkpoint to HF")
def test_every_field_is_equal_or_refused_and_nothing_between(rows):
    fields = {f.name for f in dataclasses.fields(TransformerConfig)}
    assert fields <= {row.field for row in rows}
    for row in rows:
        if row.outcome == "equal" and row.field not in DTYPES:
            assert row.difference < ROOM, row
        elif row.outcome == "refused":  # by name, and not by the proof alone
            assert row.said, row
            assert "would not be the engine's" not in row.said, row
    shows = [row for row in rows if row.outcome != "engine" and row.moved and row.moved > 0.01]
    assert len(shows) >= 45
    assert {row.outcome for row in shows} == {"equal", "refused"}


def test_what_is_said_to_have_no_effect_has_none(rows):
    """Alone: with others, which are refused, it may have one."""
    for row in rows:
        if row.field in settings._FREE - DTYPES and "=" not in row.value:
            by_plug = row.said.startswith("by the plug")  # layers for inference alone
            assert row.outcome in ("equal", "engine") or by_plug, row
            assert row.moved is None or row.moved < ROOM, row


def test_settings_that_were_known_to_be_wrong_are_named(rows):
    refused = {row.field: row.said for row in rows if row.outcome == "refused"}
    for name in ("rotary_interleaved", "softmax_scale", "rotary_percent", "window_size"):
        assert refused[name].startswith(f"{name} must be "), refused[name]
    exported = {row.field for row in rows if row.outcome == "equal" and (row.moved or 0) > 0.01}
    wanted = {
        "rope_scaling",
        "rope_scaling_factor",
        "seq_len_interpolation_factor",
        "rotary_base",
        "bf16",
    }
    assert wanted | {"share_embeddings_and_output_weights", "layernorm_epsilon"} <= exported


def test_a_field_that_a_newer_megatron_adds_is_refused_once_it_is_set():
    made = dataclasses.field(default_factory=list)
    fields = [("brand_new", bool, False), ("made", list, made)]
    newer = dataclasses.make_dataclass("Newer", fields, bases=(TransformerConfig,))
    model = small(SIPS)
    values = {f.name: getattr(model.config, f.name) for f in dataclasses.fields(model.config)}
    changed = object.__new__(newer)
    vars(changed).update(values, brand_new=False, made=[])
    model.config = changed
    to_hugging_face(model)
    changed.brand_new = True
    with pytest.raises(ValueError, match=r"brand_new must be False .* got brand_new=True"):
        to_hugging_face(model)


def said(router, **changes):
    """Lines of a model's construction."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        small(router, **changes)
    return [str(w.message) for w in caught if "for an export to Hugging Face" in str(w.message)]


def test_settings_without_an_export_are_said_once_a_model_before_the_training():
    assert not said(SIPS)
    (line,) = said(SIPS, moe_expert_capacity_factor=1.0)
    assert "moe_expert_capacity_factor=1.0; the folder drops no token: train without" in line
    (line,) = said(SIPS, moe_router_score_function="sigmoid")
    assert line.endswith("'sigmoid' has one with {'kind': 'sigmoid'}")
    lines = said(
        SIPS, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=2.5, moe_router_num_groups=2, moe_router_group_topk=1,
    )  # fmt: skip
    assert len(lines) == 4 and sum("{'kind': 'sigmoid'}" in line for line in lines) == 3
    sigmoid = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    assert not said({"kind": "sigmoid"}, **sigmoid)
    (line,) = said({"kind": "sigmoid"})  # softmax scores
    assert "moe_router_score_function must be sigmoid with a sigmoid router" in line


def test_arguments_of_the_model_are_said_before_the_training_too():
    assert not without_export(small(SIPS))
    none = small(SIPS, arguments={"position_embedding_type": "none"}, moe_input_jitter_eps=0.1)
    jitter, position = without_export(none)
    assert "moe_input_jitter_eps must be None" in jitter
    assert position.startswith("position_embedding_type must be rope")
    both = {"rope_scaling": True, "seq_len_interpolation_factor": 2.0}
    (line,) = without_export(small(SIPS, arguments=both))
    assert line.startswith("seq_len_interpolation_factor must be None beside rope_scaling")
    assert not without_export(small(SIPS, arguments={"post_process": False}))  # a rank's part


def test_ranks_are_no_fault_of_a_training():
    router = small(SIPS).decoder.layers[0].mlp.router.l2r
    config = configuration(tensor_model_parallel_size=2, sequence_parallel=True)
    assert not settings.fields_without_export(config, router)
    config.activation_func = nn.functional.gelu
    (line,) = settings.fields_without_export(config, router)
    assert "activation_func must be silu" in line
    model = small(SIPS)
    model.config.tensor_model_parallel_size = 2
    with pytest.raises(ValueError, match="load the checkpoint into a model of one rank"):
        to_hugging_face(model)


def test_the_base_of_the_rotary_frequencies_is_the_one_that_is_computed_with():
    """Megatron 0.19 keeps another, where its configuration has one."""
    model = small(SIPS, arguments={"rotary_base": 500_000})
    model.rotary_base = 10_000
    assert to_hugging_face(model).config.rope_parameters["rope_theta"] == 500_000
    frequencies = 1.5 ** -(torch.arange(0, 32, 2) / 32)
    assert settings._base_of(frequencies) == pytest.approx(1.5, rel=1e-6)
