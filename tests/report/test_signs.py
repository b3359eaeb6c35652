"""Signs and sides of a study's page: first - second, better on the right, ends in order."""

import dataclasses
import math

import numpy as np
import pytest

from l2r.files.diagnosis import Diagnosis
from l2r.files.folder import RunFolder
from l2r.report.palette import INK
from l2r.report.routing import gain_bars, robustness_bars, usage_by_layer
from l2r.stats.intervals import Interval
from l2r_lab.report.curves import curves
from l2r_lab.report.evidence import _chance
from l2r_lab.report.evidence_figures import curves_with_bands, forest
from l2r_lab.report.evidence_tables import arm_table, contrast_table, precision_table, show_interval
from l2r_lab.studies.judging import study_of
from l2r_lab.studies.registration import RegisteredPlan
from l2r_lab.studies.study_plan import StudyPlan
from tests.l2r_lab.studies.studies import SMALL, made_up

GREEN, ORANGE, BLUE, DARK = "#009e73", "#d55e00", "#0072b2", INK
NOISE = (0.0, 0.002, -0.001)  # of three seeds
MARGIN = 0.02


def study(gap, better="smaller", before=0.0, metric="validation_ce"):
    """Three seeds, in which l2r is above linear by ``gap`` at the end and ``before`` at step 0."""
    contrasts = [
        {
            "first": "l2r", "second": "linear", "metric": metric, "primary": True, "better": better,
        }
    ]  # fmt: skip
    changes = {"contrasts": contrasts, "margins": {metric: MARGIN}}
    plan = RegisteredPlan(
        StudyPlan.model_validate({**SMALL, **changes}), "small", "d", "c", "registered"
    )

    def value(arm, seed, name, trained):
        return 5 + 0.1 * seed + (arm == "l2r") * (NOISE[seed] + (gap if trained else before))

    return study_of(plan, made_up(plan, 3, value))


@pytest.mark.parametrize(
    ("gap", "better", "verdict", "color"),
    [
        (-0.5, "smaller", "better", GREEN),
        (+0.5, "smaller", "worse", ORANGE),
        (+0.5, "larger", "better", GREEN),
        (-0.5, "larger", "worse", ORANGE),
        (0.0, "smaller", "equivalent", BLUE),
    ],
)
def test_better_is_green_and_on_the_right(gap, better, verdict, color):
    one = study(gap, better, before=0.1)
    before, after = forest(one, one.judged, untrained=True).data
    assert (after.name, after.marker.color, before.name) == (verdict, color, "step 0")
    side = 1 if better == "larger" else -1
    mean = sum(NOISE) / 3
    assert after.x[0] == pytest.approx(side * (gap + mean))  # nats, not margins
    assert before.x[0] == pytest.approx(side * (0.1 + mean))
    assert after.error_x.array[0] > 0
    sign = "+" if gap + mean > 0 else "-"
    assert after.hovertext.startswith(f"{verdict}: {sign}")


def test_no_verdict_is_dark():
    wide = study(0.05)
    results = [
        dataclasses.replace(r, trained={**r.trained, "validation_ce": 5.0 + 9 * (r.seed - 1)})
        if r.arm == "l2r"
        else r
        for r in wide.results
    ]
    plan = StudyPlan.model_validate(SMALL)
    again = study_of(RegisteredPlan(plan, "small", "d", "c", "registered"), results)
    assert again.judged[0].verdict == "no verdict"
    assert forest(again, again.judged).data[0].marker.color == DARK


def test_a_difference_is_first_minus_second_and_every_number_stands_in_its_column():
    one = study(0.5, before=-0.3)
    (judged,), (row,) = one.judged, contrast_table(one).records()
    mean = sum(NOISE) / 3
    assert row["first"] == f"l2r {5.1 + 0.5 + mean:.4f}" and row["second"] == "linear 5.1000"
    assert row["difference"].startswith(f"+{0.5 + mean:.4f} [+0.4")
    assert row["at step 0"].startswith(f"-{0.3 - mean:.4f} [-0.3")
    assert row["p"] == f"{judged.p:.2g}" and row["p equivalent"] == f"{judged.p_equivalent:.2g}"
    assert judged.p < 0.05 < judged.p_equivalent  # so that no one stands for the other
    assert (row["seeds"], row["verdict"], row["kind"]) == (3, "worse", "primary")


def test_an_interval_is_printed_with_signs_and_its_ends_in_order():
    assert show_interval(Interval(0.01, -0.02, 0.04)) == "+0.0100 [-0.0200, +0.0400]"
    assert show_interval(Interval(-0.5, -0.75, -0.25)) == "-0.5000 [-0.7500, -0.2500]"


def test_precision_is_that_of_the_widest_and_the_rms_of_all():
    one = study(0.0)
    (judged,) = one.judged
    wider = dataclasses.replace(judged, sd=2.0, difference=Interval(0.0, -3.0, 3.0))
    other = dataclasses.replace(judged, sd=1.0, difference=Interval(0.0, -0.5, 0.5))
    (row,) = precision_table(dataclasses.replace(one, judged=[wider, other])).records()
    assert row["contrasts"] == 2 and row["largest SD"] == 2.0 and row["widest half-width"] == 3.0
    assert row["SD of paired differences, rms"] == pytest.approx(math.sqrt((4 + 1) / 2))


def test_arms_have_their_end_and_their_step_0():
    linear, l2r = arm_table(study(0.5, before=-0.3)).records()
    mean = sum(NOISE) / 3
    assert linear["arm"] == "linear" and linear["validation CE"] == pytest.approx(5.1)
    assert l2r["validation CE"] == pytest.approx(5.6 + mean) and l2r["seeds"] == 3
    assert l2r["validation CE, step 0"] == pytest.approx(4.8 + mean)
    # Of 5.0, 5.1 and 5.2 the deviation is 0.1; t of two degrees of freedom is 4.3027.
    assert linear["validation CE ±"] == pytest.approx(4.302653 * 0.1 / math.sqrt(3))


def test_chance_counts_secondary_contrasts_only():
    one = study(0.0)
    (judged,) = one.judged
    second = dataclasses.replace(
        judged, contrast=dataclasses.replace(judged.contrast, primary=False)
    )
    several = dataclasses.replace(one, judged=[judged] + 40 * [second])
    assert _chance(several) == (
        "Of 40 secondary contrasts without any difference, 2.0 would be decided by chance."
    )


def test_the_gap_of_a_curve_is_the_arm_less_the_first():
    one = study(0.0)
    results = [
        dataclasses.replace(r, curve=[(10, 6.0 + 0.5 * (r.arm == "l2r"))]) for r in one.results
    ]
    lines = [
        line
        for line in curves_with_bands(dataclasses.replace(one, results=results)).data
        if line.mode == "lines" and line.fill is None
    ]
    shown = [(line.name, line.y[0]) for line in lines]
    assert shown == [("linear", 6.0), ("linear", 0.0), ("l2r", 6.5), ("l2r", 0.5)]


def test_health_is_that_of_the_worst_layer(tmp_path):
    run = RunFolder(tmp_path)
    lists = {"load_entropy": [0.9, 0.5], "max_over_mean": [2.0, 3.0], "dead_experts": [1, 4]}
    for step in (1, 2):
        run.append_metrics({"kind": "train", "step": step, "tokens": 5 * step, **lists})
    worst = {"load_entropy": 0.5, "max_over_mean": 3.0, "dead_experts": 5.0}
    for field, expected in worst.items():
        (line,) = curves({"a": [run]}, [("train", field, field, "y")], "tokens").data
        assert list(line.y) == [expected] * 2 and list(line.x) == [5, 10]


def test_a_line_is_the_mean_of_its_seeds_where_all_have_been(tmp_path):
    runs = [RunFolder(tmp_path / name) for name in "ab"]
    for number, run in enumerate(runs):
        run.create()
        for step in (1, 2, 3)[: 3 - number]:
            run.append_metrics({"kind": "train", "step": step, "tokens": step, "z": step + number})
    (line,) = curves({"a": runs}, [("train", "z", "z", "y")], "tokens").data
    assert list(line.x) == [1, 2] and list(line.y) == [1.5, 2.5]


def test_bars_show_gains_and_intervals_on_their_sides():
    info = {"model": {"routing_gain": 0.5, "shuffled_gain": -0.25}}
    random, shuffled = gain_bars({"a": Diagnosis(info, [{}], {})}).data
    assert list(random.y) == [0.5] and list(shuffled.y) == [-0.25]
    info = {"model": {"routing_gain": 0.5, "shuffled_gain": -0.0002}}
    assert gain_bars({"a": Diagnosis(info, [{}], {})}).data[1].text == ("-0.0002",)
    fields = ("scale_free_margin", "stability", "topk_overlap")
    layer = {**dict.fromkeys(fields, 0.9), "stability_interval": [0.8, 0.95]}
    bars = robustness_bars({"a": Diagnosis({}, [layer], {})}).data
    assert bars[1].error_y.array[0] == pytest.approx(0.05)  # upwards
    assert bars[1].error_y.arrayminus[0] == pytest.approx(0.1)


def test_use_is_relative_to_the_mean_of_the_layer():
    arrays = {"0.topk": [0.1, 0.3, 0.2], "1.topk": [0.0, 0.0, 0.0]}
    view = Diagnosis({}, [{}, {}], {name: np.array(value) for name, value in arrays.items()})
    (heat,) = usage_by_layer({"a": view}, "topk").data
    np.testing.assert_allclose(heat.z, [[0.5, 1.5, 1.0], [0.0, 0.0, 0.0]])
