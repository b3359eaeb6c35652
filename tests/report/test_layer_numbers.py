"""A layer has one number on every page: that of its block in the model, dense blocks counted."""

from dataclasses import replace

import numpy as np
import pytest

from l2r.files.arrays import PatchRouting
from l2r.files.diagnosis import Diagnosis
from l2r.files.folder import RunFolder
from l2r.report.analyses import analysis_sections
from l2r.report.diagnosis import write_diagnosis
from l2r.report.geometry import pca_scatter, routing_planes
from l2r.report.patches import patch_figure, patch_sections
from l2r.report.routing import usage_by_domain, usage_by_layer
from l2r.report.specialization import (
    coactivation_heatmaps,
    domain_shares,
    saturation_curves,
    specialization_by_layer,
)

NAMES = ["vit.layers.2.mlp.router", "vit.layers.3.mlp.router"]
EXPERTS = 4


def view_of(names=NAMES):
    """The experts of the last blocks, as vision models have them."""
    draw = np.random.default_rng(0)
    one = {
        "top1": np.full(EXPERTS, 0.25),
        "topk": np.full(EXPERTS, 0.5),
        "importance": np.full(EXPERTS, 0.25),
        "usage_by_domain": np.ones((2, EXPERTS)),
        "coactivation": draw.random((EXPERTS, EXPERTS)),
        "experts": draw.integers(0, EXPERTS, (6, 5, 2)),
        "sample_x": draw.normal(size=(20, 5)),
        "sample_query": draw.normal(size=(20, 2)),
        "sample_first": draw.integers(0, EXPERTS, 20),
        "plane_axis": np.linspace(-1, 1, 5),
        "plane_first": draw.integers(0, EXPERTS, (5, 5)),
        "anchors": draw.normal(size=(EXPERTS, 2, 2)),
    }
    arrays = {f"{i}.{name}": value for i in range(len(names)) for name, value in one.items()}
    fields = ("mean_margin", "cosine_variance", "coactivation", "low_margin_rate")
    layers = [{"name": name, **dict.fromkeys(fields, 0.5)} for name in names]
    info = {
        "experts": EXPERTS, "domains": ["zero", "one"], "tokens": 30, "sampled": 20, "data": 1,
        "paths": [([0, 1], 3)], "settings": {"certify": 0, "sigma": 0.02},
    }  # fmt: skip
    return Diagnosis(info, layers, arrays)


def titles(figure):
    return [note.text.partition("<br>")[0] for note in figure.layout.annotations]


def test_every_figure_numbers_layers_by_their_blocks():
    view, both = view_of(), [0, 1]
    assert list(usage_by_layer({"a": view}, "top1").data[0].y) == ["2", "3"]
    assert [y.split()[0] for y in usage_by_domain({"a": view}).data[0].y] == ["2", "2", "3", "3"]
    assert titles(pca_scatter(view, both))[:2] == ["x, layer 2", "x, layer 3"]
    assert titles(routing_planes(view, both)) == [
        "Routing plane, layer 2",
        "Routing plane, layer 3",
    ]
    assert titles(domain_shares(view, both, "a")) == ["layer 2", "layer 3"]
    assert titles(coactivation_heatmaps(view, both, "a")) == ["a, layer 2", "a, layer 3"]
    assert list(specialization_by_layer({"a": view}).data[1].x) == [2, 3]
    over_time = {
        "checkpoints": [10, 20],
        "top1": [[0.2, 0.4], [1, 1]],
        "topk": [[0.5, 0.6], [1, 1]],
    }
    lines = saturation_curves(view, over_time).data
    assert [line.name for line in lines[:2]] == ["layer 2", "layer 3"]
    view.info["over_time"] = over_time
    (section,) = (s for s in analysis_sections({"a": view}, details=False) if "Satur" in s.title)
    assert section.parts[0].data[1].name == "layer 3"


def _patches():
    return PatchRouting(
        layers=np.array(NAMES),
        experts=np.zeros((2, 1, 2, 2, 1), np.int16),
        weights=np.ones((2, 1, 2, 2, 1), np.float32),
        images=np.zeros((1, 4, 4, 1), np.uint8),
        labels=np.zeros(1, np.int64),
        predictions=np.zeros(1, np.int64),
        classes=np.array(["zero"]),
        num_experts=np.array(EXPERTS),
        class_token=np.zeros((2, 1, 1), np.int16),
    )


def test_runs_of_other_images_have_a_figure_each(tmp_path):
    runs = [RunFolder(tmp_path / name) for name in ("a", "b", "c")]
    for run, more in zip(runs, (0, 0, 1), strict=True):
        run.create()
        replace(_patches(), images=_patches().images + more).save(run.patches)
    (section,) = patch_sections(runs)
    assert [len(figure.layout.annotations) for figure in section.parts] == [4, 3]


def test_the_page_of_patches_and_that_of_the_diagnosis_count_alike(tmp_path):
    routing = _patches()
    assert titles(patch_figure(routing))[1:3] == ["layer 2", "layer 3"]
    page = write_diagnosis({"a": view_of()}, tmp_path / "index.html").read_text()
    assert "<td>2 vit.layers.2.mlp.router</td>" in page
    assert "<td>0 vit.layers.2.mlp.router</td>" not in page


@pytest.mark.parametrize(
    ("names", "numbers"),
    [
        (["model.layers.1.mlp.gate", "model.layers.11.mlp.gate"], ["1", "11"]),
        (["gate"], ["0"]),
        (["", ""], ["0", "1"]),
        # of an encoder and of a decoder, which count apart
        ([f"{part}.block.1.layer.1.mlp.router" for part in ("encoder", "decoder")], ["0", "1"]),
    ],
)
def test_layers_without_a_block_of_their_own_are_counted_from_0(names, numbers):
    view = view_of(names)
    assert [view.label(layer) for layer in range(len(names))] == numbers
