"""Figures of the diagnosis are drawn from plain arrays and show what they are given."""

import math
import re

import numpy as np
import pytest

from l2r.files.diagnosis import Diagnosis, read_diagnosis
from l2r.report import geometry, routing
from l2r.report.diagnosis import _details, write_diagnosis
from l2r.report.page import Section
from l2r_lab.report import landscape
from tests.report.pages import made_diagnosis

RNG = np.random.default_rng(0)


def test_principal_axes_equal_a_singular_value_decomposition():
    points = RNG.normal(size=(50, 6)) * [5, 1, 3, 0.2, 0.1, 2] + 7
    flat, shares = geometry.principal_axes(points)
    centerd = points - points.mean(axis=0)
    u, s, _ = np.linalg.svd(centerd, full_matrices=False)
    np.testing.assert_allclose(np.abs(flat), np.abs(u[:, :2] * s[:2]), atol=1e-9)
    np.testing.assert_allclose(shares, s[:2] ** 2 / (s**2).sum())


def test_scatter_has_a_panel_per_cloud_and_colors_64_experts():
    tokens = {"sample_x": RNG.normal(size=(900, 5)), "sample_query": RNG.normal(size=(900, 3))}
    layer = {**tokens, "sample_first": np.arange(900) % 64}
    arrays = {f"{number}.{name}": values for number in range(3) for name, values in layer.items()}
    figure = geometry.pca_scatter(Diagnosis({"experts": 64}, [], arrays), [0, 1, 2])
    assert len(figure.data) == 6
    assert all(0 < len(trace.x) <= 600 for trace in figure.data)
    axis = figure.layout.coloraxis
    assert (axis.cmin, axis.cmax) == (-0.5, 63.5)
    assert len(axis.colorbar.tickvals) <= 16
    assert len({color for _, color in axis.colorscale}) == 64
    assert figure.layout.xaxis.title.text.startswith("PC1 (")


def test_a_scatter_of_rank_1_and_of_tokens_that_are_not_finite_is_drawn():
    query, first = RNG.normal(size=(30, 1)), np.arange(30) % 4
    query[:2] = np.nan
    arrays = {"0.sample_x": RNG.normal(size=(30, 5)), "0.sample_query": query}
    view = Diagnosis({"experts": 4}, [], {**arrays, "0.sample_first": first})
    _, drawn = geometry.pca_scatter(view, [0]).data
    assert len(drawn.x) == 28 and set(drawn.y) == {0.0}
    assert list(drawn.marker.color) == first[2:].tolist()


def test_planes_show_regions_tokens_and_anchors():
    layer = {
        "plane_axis": np.linspace(-2, 2, 21),
        "plane_first": RNG.integers(0, 4, size=(21, 21)),
        "anchors": RNG.normal(size=(4, 3, 2)),
        "sample_query": RNG.normal(size=(30, 2)),
    }
    arrays = {f"{number}.{name}": values for number in range(2) for name, values in layer.items()}
    figure = geometry.routing_planes(Diagnosis({"experts": 4}, [], arrays), [0, 1])
    kinds = [trace.type for trace in figure.data]
    assert kinds == ["heatmap", "scatter", "scatter"] * 2
    assert len(figure.data[2].x) == 12
    assert list(figure.data[2].marker.color) == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


def test_variance_bars_show_means_layers_and_the_reference():
    variances = {"linear": [0.01, 0.03], "l2r_sips": [0.4, 0.7]}
    layers = {name: [{"cosine_variance": v} for v in both] for name, both in variances.items()}
    views = {name: Diagnosis({}, of_model, {}) for name, of_model in layers.items()}
    figure = geometry.cosine_variance_bars(views)
    assert list(figure.data[0].y) == pytest.approx([0.02, 0.55])
    assert list(figure.data[1].y) == [0.01, 0.03, 0.4, 0.7]
    assert [trace.y[0] for trace in figure.data[2:]] == [0.5, 0.5]  # without a space of their own
    assert figure.layout.yaxis.range[1] > 0.7
    views["linear"].arrays["0.sample_x"] = RNG.normal(size=(4, 128))
    views["l2r_sips"].arrays["0.sample_query"] = RNG.normal(size=(4, 2))
    even = [trace.y[0] for trace in geometry.cosine_variance_bars(views).data[2:]]
    assert even == [1 / 128, 1 / 2]  # each router is held against its own space


def test_certified_curves_fall_and_lie_below_what_was_found():
    certified = np.sort(RNG.random(200))
    found = certified * 1.1
    found[-1] = np.inf
    radii = {f"0.certified_{d}": certified for d in ("top1", "topk")}
    radii |= {f"0.found_{d}": found for d in ("top1", "topk")}
    arrays = {**radii, "0.sample_x": np.zeros((1, 9))}
    view = Diagnosis({"settings": {"sigma": 0.1}}, [{}], arrays)
    figure = routing.certified_curves({"a": view})
    proven, searched = figure.data[0], figure.data[1]
    assert proven.y[0] == 1
    assert (np.diff(proven.y) <= 0).all()
    assert (np.array(proven.y) <= np.array(searched.y)).all()
    assert {shape.x0 for shape in figure.layout.shapes} == {0.3}


def test_robustness_bars_carry_the_intervals_that_there_are():
    layer = dict.fromkeys(("mean_margin", "scale_free_margin", "stability", "topk_overlap"), 0.9)
    layer |= {f"{name}_interval": [0.88, 0.93] for name in ("stability", "topk_overlap")}
    bars = routing.robustness_bars({"a": Diagnosis({}, [layer], {})}).data
    assert [bar.y[0] for bar in bars] == [0.9] * 3  # no raw margin: units differ by scoring
    assert bars[1].error_y.array[0] == pytest.approx(0.03)
    assert bars[2].error_y.arrayminus[0] == pytest.approx(0.02)
    assert bars[0].error_y.array is None


@pytest.mark.parametrize(
    ("gains", "numbers"),
    [
        ((0.3,), ["0.300"]),
        ((0.3, 0.31), ["0.300", "0.310"]),
        ((0.3, 0.30002), ["0.30000", "0.30002"]),
        ((0.3, -0.0002), ["0.3000", "-0.0002"]),
        ((0.5, 0.5), ["0.500", "0.500"]),
    ],
)
def test_bars_stand_on_zero_and_numbers_above_tell_small_differences(gains, numbers):
    views = {
        f"run {n}": Diagnosis({"model": {"routing_gain": gain}}, [{}], {})
        for n, gain in enumerate(gains)
    }
    figure = routing.gain_bars(views)
    low, high = figure.layout.yaxis.range
    assert low == 0.0 if min(gains) >= 0 else low < min(gains)
    assert high > max(gains) and list(figure.data[0].text) == numbers


def test_only_chance_is_dotted_or_dashed():
    """In every figure of the page: a broken line that is not chance would be read as chance."""
    radii = {"linear": made_diagnosis(0), "l2r_sips_tuned": made_diagnosis(1)}
    sections = _details(radii) + [Section("", parts=[routing.usage_by_layer(radii, "topk")])]
    figures = [p for s in sections for p in s.parts if hasattr(p, "to_plotly_json")]
    broken = {
        trace.name
        for figure in figures
        for trace in figure.data
        if getattr(trace, "line", None) is not None
        and (trace.line.to_plotly_json().get("dash") or "solid") != "solid"
    }
    assert broken and all("by chance" in name for name in broken)
    lines = [shape.line.dash or "solid" for figure in figures for shape in figure.layout.shapes]
    assert set(lines) <= {"solid", "dot"}  # dot: saturation by chance


def test_landscapes_hold_every_rule():
    axis = np.linspace(-1, 1, 5)
    grids = {name: RNG.normal(size=(5, 5)) for name in ("a", "b", "c", "d", "e")}
    surfaces = landscape.landscapes_3d(axis, grids)
    assert [trace.type for trace in surfaces.data] == ["surface"] * 5
    flat = landscape.landscapes_2d(axis, {"a": grids["a"]}, (2.0, 2.0))
    assert [trace.type for trace in flat.data] == ["contour", "scatter"]
    np.testing.assert_allclose(flat.data[0].z, grids["a"], atol=1e-4)  # four decimals


@pytest.mark.parametrize("decisions", [["topk"], ["top1", "topk"]])
@pytest.mark.slow("whole pages")
def test_a_page_of_infinite_radii_is_the_same_from_its_files(tmp_path, decisions):
    """Where tokens go to all experts no change flips the set; with one expert, nor the first."""
    made = made_diagnosis()
    for decision in decisions:
        for layer, row in enumerate(made.layers):
            row[f"certified_{decision}"] = row[f"found_{decision}"] = math.inf
            for kind in ("certified", "found"):
                made.array(layer, f"{kind}_{decision}")[:] = math.inf
    made.info["model"]["routing_gain"] = math.inf
    made.save(tmp_path)
    for view in (made, read_diagnosis(tmp_path)):
        page = write_diagnosis({"x": view}, tmp_path / "index.html").read_text()
        titles = re.findall(r"<h2[^>]*>(.*?)</h2>", page)
        assert "Certified routing" in titles and "Specialization" in titles
