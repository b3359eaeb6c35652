"""Figures of the analyses are drawn from plain arrays and show what they are given."""

import numpy as np
import pytest

from l2r.files.diagnosis import Diagnosis
from l2r.report import specialization
from l2r.report.analyses import analysis_sections
from l2r.report.routing import usage_by_domain

RNG = np.random.default_rng(0)
DEPTH, EXPERTS = 3, 20


def _view(seed=0, data=1):
    fields = ("vocabulary_input", "coactivation", "domain_specialization")
    ends = {"": 0.6, "_by_chance": 0.3, "_by_chance_low": 0.2, "_by_chance_high": 0.4}
    layer = {f"{field}{end}": value for field in fields for end, value in ends.items()}
    arrays = {}
    for i in range(DEPTH):
        arrays[f"{i}.coactivation"] = RNG.random((EXPERTS, EXPERTS))
        arrays[f"{i}.experts"] = np.random.default_rng(seed).integers(0, EXPERTS, (6, 30, 2))
        arrays[f"{i}.frequency"] = RNG.random((5, 4))
        arrays[f"{i}.usage_by_domain"] = np.full((2, EXPERTS), 10.0)
        arrays[f"{i}.topk"] = np.full(EXPERTS, 2 / EXPERTS)
    info = {
        "data": data,
        "domains": ["one", "two"],
        "paths": [([0, 1, 2], 18)],
        "model": {"routing_gain": 0.5, "shuffled_gain": 0.25, "cross_entropy": 2.0},
    }
    return Diagnosis(info, [dict(layer) for _ in range(DEPTH)], arrays)


def test_lines_over_layers_come_with_chance_and_its_band():
    view = _view()
    del view.layers[0]["coactivation_by_chance_low"]  # as the first layer has no layer before it
    figure = specialization.specialization_by_layer({"a": view})
    titles = [a.text for a in figure.layout.annotations]
    assert titles == ["Domain: largest share", "Vocabulary: the token itself",
                      "Co-activation: strongest partner"]  # fmt: skip
    band, own, chance = figure.data[:3]
    assert list(band.x) == [0, 1, 2, 2, 1, 0] and set(band.y) == {0.2, 0.4}
    assert list(own.y) == [0.6] * 3 and list(chance.y) == [0.3] * 3 and chance.line.dash == "dot"
    assert list(figure.data[6].x) == [1, 2, 2, 1]


def test_domain_bars_are_shares_of_tokens_beside_an_even_use():
    figure = specialization.domain_shares(_view(), [0, 2], "a")
    assert [trace.name for trace in figure.data] == ["one", "two"] * 2
    assert list(figure.data[0].y) == pytest.approx([2 / EXPERTS] * EXPERTS)
    assert [shape.y0 for shape in figure.layout.shapes] == pytest.approx([2 / EXPERTS] * 2)


def test_of_many_domains_those_with_the_most_tokens_are_drawn():
    view = _view()
    view.info["domains"] = [f"class {n}" for n in range(100)]
    for layer in range(DEPTH):
        view.arrays[f"{layer}.usage_by_domain"] = np.outer(np.arange(100) + 1.0, np.ones(EXPERTS))
    figure = specialization.domain_shares(view, [0, 2], "a")
    names = [f"class {n}" for n in range(84, 100)]
    assert [trace.name for trace in figure.data] == names * 2
    assert "16 of 100 domains" in figure.layout.title.text
    assert len(usage_by_domain({"a": view}).data[0].y) == 16 * DEPTH


def test_heatmaps_show_the_strongest_pairs_and_chance():
    view = _view()
    together = view.arrays["1.coactivation"] = np.zeros((EXPERTS, EXPERTS))
    together[3, 17] = together[17, 3] = 1
    every = specialization.coactivation_heatmaps(view, [1], "a", most=EXPERTS)
    assert every.layout.title.text.endswith("of all experts")
    figure = specialization.coactivation_heatmaps(view, [1], "a", most=2)
    assert "the 2 experts with the strongest pairs" in figure.layout.title.text
    assert list(figure.data[0].x) == ["3", "17"] and figure.data[0].z[0][1] == 1
    assert "by chance: 0.30" in figure.layout.annotations[0].text


def test_agreement_is_drawn_for_what_read_the_same_tokens():
    views = {"a": _view(0), "b": _view(0), "c": _view(1)}
    figure = specialization.agreement_heatmaps(views)
    told, matched, chance = (np.array(trace.z) for trace in figure.data)
    assert told[0, 1] == pytest.approx(1) and matched[1, 0] == 1
    assert abs(told[0, 2]) < 0.2 and 0 < chance[0, 1] < 1
    assert np.isnan(np.diag(told)).all()
    assert specialization.agreement_heatmaps({"a": _view(), "b": _view(data=2)}) is None


def test_saturation_is_a_line_per_layer_over_the_steps():
    found = {"checkpoints": [10, 20], "top1": [[0.2, 0.4], [1, 1]], "topk": [[0.5, 0.6], [1, 1]]}
    view = Diagnosis({}, [{"name": f"blocks.{n}.router"} for n in (4, 7)], {})
    figure = specialization.saturation_curves(view, {**found, "top1_by_chance": [0.1, 0.3]})
    assert [list(trace.y) for trace in figure.data] == [[0.2, 1], [0.4, 1], [0.5, 1], [0.6, 1]]
    assert figure.layout.shapes[0].y0 == pytest.approx(0.2)
    assert figure.layout.xaxis.title.text == "step"
    assert [line.name for line in figure.data] == ["layer 4", "layer 7"] * 2


def test_sections_are_of_what_was_measured():
    view = _view()
    titles = [section.title for section in analysis_sections({"a": view}, details=True)]
    assert titles == ["Routing gain", "Specialization", "Experts of a"]
    two = analysis_sections({"a": view, "b": _view(1)}, details=False)
    assert [s.title for s in two] == ["Routing gain", "Specialization", "Agreement of routers"]
    assert analysis_sections({"old": Diagnosis({"domains": []}, [{}], {})}, details=True) == []
