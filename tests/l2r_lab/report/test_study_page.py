"""The page of a study: its first screen, units and names."""

import re

import pytest

from l2r.stats.intervals import Interval
from l2r_lab.report.evidence import write_study
from l2r_lab.report.evidence_figures import forest, largest_effects
from l2r_lab.report.evidence_scales import log_ticks, sides_of_names, unbeaten
from l2r_lab.report.evidence_tables import first_table
from l2r_lab.stats.effects import Effect
from l2r_lab.studies.judging import study_of
from l2r_lab.studies.registration import RegisteredPlan
from l2r_lab.studies.study_plan import StudyPlan
from tests.l2r_lab.studies.studies import SMALL, made_up

PAIR = {"first": "l2r", "second": "linear", "primary": True}
ENTROPY = {**PAIR, "metric": "load_entropy", "better": "larger"}


def study(*contrasts):
    """Three seeds; l2r is 0.3 nats lower and its other measures 0.3 lower too, but for noise."""
    plan = {**SMALL, "seeds": {"least": 3, "most": 3}, "contrasts": list(contrasts)}
    plan["margins"] = {contrast["metric"]: 0.02 for contrast in contrasts}
    registered = RegisteredPlan(StudyPlan.model_validate(plan), "small", "d", "c", "registered")

    def value(arm, seed, name, trained):
        return 5 + 0.1 * seed - (arm == "l2r") * (0.3 + 0.01 * seed) * trained

    return study_of(registered, made_up(registered, 3, value))


def test_the_first_screen_shows_the_verdict_in_nats_and_folds_the_rest(tmp_path):
    page, _ = write_study(study({**PAIR, "metric": "validation_ce"}), tmp_path, tmp_path)
    text = page.read_text()
    body = text[text.index("<h1") :]
    assert "is 0.310 nats below linear in validation CE (better)" in body
    verdict, drawn, cannot = (
        body.index(w) for w in ("class='verdict'", "plotly", "class='cannot'")
    )
    assert verdict < drawn < cannot < body.index("<h2")
    assert "toward better" not in text and "validation CE, nats" in text
    folded = re.findall(r"<details[^>]*><summary>.*?<h2[^>]*>([^<]*)", body)
    assert {"Training", "Every arm and seed", "Precision", "Registration and method"} <= {*folded}
    method = body.index("Differences are first - second, paired by seed")
    assert method > body.index("Registration and method</h2>")


def test_a_panel_per_metric_has_its_unit_and_every_row_its_number():
    one = study({**PAIR, "metric": "validation_ce"}, ENTROPY)
    figure = forest(one, one.judged)
    titles = [figure.layout[name].title.text for name in ("xaxis", "xaxis2")]
    assert titles[0].startswith("validation CE, nats") and titles[1].startswith(
        "load entropy, share"
    )
    assert [line.x[0] for line in figure.data] == pytest.approx([0.31, -0.31])
    assert [note.text for note in figure.layout.annotations] == ["0.310", "0.310"]
    names = [figure.layout[name].ticktext[0] for name in ("yaxis", "yaxis2")]
    assert all(name.startswith("l2r vs linear<br>") for name in names)
    assert "better" in names[0] and "worse" in names[1]
    (row, _) = first_table(one.judged).rows
    assert row[:2] == ("l2r vs linear", "validation CE") and row[2].startswith("-0.310 [-0.3")


def test_the_largest_effects_of_a_screen_are_drawn_from_fall_to_rise():
    sizes = [0.01, -0.2, 0.3, -0.05]
    effects = [
        ("l2r", Effect("rank", str(n), Interval(v, v - 0.1, v + 0.1))) for n, v in enumerate(sizes)
    ]
    figure = largest_effects(effects, most=3)
    assert list(figure.data[0].x) == [-0.2, -0.05, 0.3]
    assert figure.layout.yaxis.ticktext == ("l2r: rank 1", "l2r: rank 3", "l2r: rank 2")


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([4600, 5000], [4600, 5000]),  # one tick, 5,000, until both ends had one
        ([4608, 5120, 5632], [4608, 5632]),
        ([1000, 9000], [500, 1000, 2000, 5000, 10000]),
        ([300], [300]),
        ([0.2, 1.5], [0.1, 0.2, 0.5, 1, 2]),
    ],
)
def test_a_logarithmic_axis_has_ticks_at_both_ends(values, ticks):
    assert log_ticks(values) == pytest.approx(ticks)


def test_arms_that_none_beats_are_named_and_near_names_do_not_meet():
    arms = [
        (100, 5.0, "small"),
        (200, 5.1, "beaten"),
        (200, 4.9, "a"),
        (210, 4.89, "b"),
        (900, 4.0, "large"),
    ]
    assert unbeaten(arms) == {"small", "a", "b", "large"}
    assert sides_of_names(arms[2:]) == {"b": "bottom right", "a": "top right"}
