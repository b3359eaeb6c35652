"""One sentence per result: the same on the terminal and at the head of the page."""

import html
import math

import numpy as np
import pytest

from l2r.report.diagnosis import summary_table, write_diagnosis
from l2r.report.verdicts import of_checkpoints
from l2r_lab.report.comparison import write_report
from l2r_lab.report.verdicts import of_plan, of_runs
from tests.report.pages import made_diagnosis
from tests.report.runs import made_run


def runs_of(folder, values):
    """A run per name and seed, with its final cross-entropy."""
    return [
        made_run(folder / (name if seed == 0 else f"{name}.seed-{seed}"), ce=ce, seed=seed)
        for name, seeds in values.items()
        for seed, ce in enumerate(seeds)
    ]


def test_one_seed_ranks_nothing(tmp_path):
    found = of_runs(runs_of(tmp_path, {"linear": [5.1], "xmoe": [5.3], "l2r_sips": [4.9]}))
    assert found.says == (
        "One seed ranks nothing: validation CE runs from 4.900 (l2r_sips) to 5.300 (xmoe)."
    )


def test_one_seed_runs_from_the_best_accuracy(tmp_path):
    values = {"linear": 0.5, "xmoe": 0.3, "l2r_sips": 0.4}
    runs = [
        made_run(tmp_path / name, task="vision", validation=lambda _, v=v: {"top1": v})
        for name, v in values.items()
    ]
    assert of_runs(runs).says == (
        "One seed ranks nothing: top-1 accuracy runs from 0.500 (linear) to 0.300 (xmoe)."
    )


def test_paired_differences_over_seeds_decide_and_only_they(tmp_path):
    """Pairs differ by 0.2 +- 0.01 where seeds differ by 1; the last arm's by 0 +- 1."""
    values = {
        "linear": [5.0, 6.0, 7.0],
        "xmoe": [5.2, 6.21, 7.19],
        "l2r_dot": [4.8, 5.79, 6.81],
        "l2r_sips": [6.0, 5.0, 7.5],
    }
    assert of_runs(runs_of(tmp_path, values)).says == (
        "Validation CE against linear over 3 seeds: better: l2r_dot by 0.200; "
        "worse: xmoe by 0.200; not shown to differ: l2r_sips."
    )


def test_a_higher_accuracy_is_better(tmp_path):
    accuracies = {"linear": [0.5, 0.6, 0.7], "xmoe": [0.7, 0.81, 0.89], "l2r_dot": [0.3, 0.4, 0.51]}
    runs = [
        made_run(
            tmp_path / (arm if seed == 0 else f"{arm}.seed-{seed}"),
            seed=seed,
            validation=lambda _, value=value: {"top1": value},
        )
        for arm, values in accuracies.items()
        for seed, value in enumerate(values)
    ]
    assert of_runs(runs).says.endswith(
        "against linear over 3 seeds: better: xmoe by 0.200; worse: l2r_dot by 0.197."
    )


def test_an_arm_of_several_must_differ_beyond_what_one_alone_must(tmp_path):
    """Three pairs whose p lies between 2.5% and 5%: shown by itself, not as one of two."""
    base, gaps = [5.0, 6.0, 7.0], [0.10, 0.20, 0.15]  # t = 5.2 with 2 degrees: p = 3.5%
    other = [one + gap for one, gap in zip(base, gaps, strict=True)]
    alone = of_runs(runs_of(tmp_path / "2", {"linear": base, "xmoe": other}))
    assert alone.says.endswith("worse: xmoe by 0.150.")
    beside = {"linear": base, "xmoe": other, "l2r_dot": [5.1, 5.9, 7.1]}
    of_three = of_runs(runs_of(tmp_path / "3", beside))
    assert of_three.says.endswith("seeds: not shown to differ: xmoe, l2r_dot.")


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_named_and_not_ranked(tmp_path, loss):
    values = {"linear": [5.0, 6.0, 7.0], "xmoe": [5.2, loss, 7.19], "low_rank": [5.2, 6.21, 7.19]}
    assert of_runs(runs_of(tmp_path / "3", values)).says == (
        "Validation CE against linear over 3 seeds: worse: low_rank by 0.200. Not finite: xmoe."
    )
    one = {"linear": [5.0], "xmoe": [loss], "low_rank": [4.5]}
    assert of_runs(runs_of(tmp_path / "1", one)).says == (
        "One seed ranks nothing: validation CE runs from 4.500 (low_rank) to 5.000 (linear). "
        "Not finite: xmoe."
    )
    assert of_runs(runs_of(tmp_path / "0", {"xmoe": [loss]})).says == (
        "No validation CE is finite: nothing is compared. Not finite: xmoe."
    )


def test_runs_of_other_budgets_are_not_compared_but_in_a_sweep_of_budgets(tmp_path):
    runs = [made_run(tmp_path / "linear", steps=60), made_run(tmp_path / "xmoe", steps=120)]
    assert of_runs(runs).says == "Runs saw from 30,720 to 61,440 tokens: nothing is compared."
    swept = [made_run(tmp_path / f"steps={n}", steps=n) for n in (60, 120)]
    assert of_runs(swept).says.startswith("One seed ranks nothing: validation CE runs from")


def test_runs_that_go_on_are_not_judged(tmp_path):
    run = made_run(tmp_path / "linear", until=60)
    assert of_runs([run]).says == "No run is finished: nothing is compared yet."


def test_the_terminal_and_the_page_say_the_same(tmp_path):
    runs = runs_of(tmp_path / "runs", {"linear": [5.1], "l2r_sips": [4.9]})
    table, (page, *_) = write_report(runs, tmp_path / "page.html")
    assert table.verdict == of_runs(runs).says
    assert f"<p class='verdict'>{html.escape(table.verdict)}" in page.read_text()
    views = {"a": made_diagnosis(0), "b": made_diagnosis(1)}
    says = of_checkpoints(views).says
    assert summary_table(views).verdict == says
    shown = write_diagnosis(views, tmp_path / "index.html").read_text()
    assert f"<p class='verdict'>{html.escape(says)}" in shown


def of_first(view, *layers, experts=6):
    """A diagnosis with so many first choices in its layers."""
    for layer, first in enumerate(layers):
        shares = np.where(np.arange(experts) < first, 1 / first, 0)
        view.arrays[f"{layer}.top1"] = shares
    return view


def test_a_diagnosis_says_in_a_sentence_who_uses_the_fewest_experts():
    says = of_checkpoints({"mine": of_first(made_diagnosis(), 3, 2)}).says
    assert says == (
        "mine uses 2 of 6 experts as a first choice in its narrowest layer, 1. "
        "With random experts the loss of mine rises by 0.120 nats."
    )
    views = {n: of_first(made_diagnosis(), *f) for n, f in (("a", (6, 5)), ("b", (4, 6)))}
    views["b"].info["model"]["routing_gain"] = 0.05
    assert of_checkpoints(views).says == (
        "b uses the fewest experts as a first choice: 4 of 6 in its narrowest layer, 0. "
        "With random experts the loss of b rises least, by 0.050 nats."
    )


def test_a_diagnosis_without_a_narrow_layer_says_so_and_a_draw_names_all():
    full = {name: of_first(made_diagnosis(), 6, 6) for name in "ab"}
    del full["a"].info["model"]["routing_gain"]
    says = "Every checkpoint uses all its 6 experts as a first choice in every layer."
    assert of_checkpoints(full).says == says
    one = {"a": full["a"]}
    assert of_checkpoints(one).says == says.replace("Every checkpoint", "a")
    drawn = {name: of_first(view, 3, 4) for name, view in full.items()}
    assert of_checkpoints(drawn).says == (
        "a and b use the fewest experts as a first choice: 3 of 6 in the narrowest layer of each."
    )


def test_a_gain_that_rounds_to_nothing_is_said_with_its_bound():
    view = made_diagnosis()
    view.info["model"]["routing_gain"] = -0.0002
    says = of_checkpoints({"mine": view}).says
    assert " With random experts the loss of mine changes by less than 0.001 nats: " in says


def test_of_checkpoints_with_other_numbers_of_experts_the_least_share_is_named():
    views = {"few": of_first(made_diagnosis(0), 3, 3)}
    views["many"] = of_first(made_diagnosis(1), 5, 5, experts=40)
    says = of_checkpoints(views).says
    assert says.startswith("many uses the smallest share of experts as a first choice: 5 of 40 in")


@pytest.mark.parametrize(
    ("hours", "words"), [(0.05, "3.0 minutes"), (12.34, "12.3 hours"), (None, "9 tokens/s.")]
)
def test_a_plan_says_first_whether_it_fits(hours, words):
    best = {
        "simulated": 61.2e9, "formula": 1, "parallel": "fsdp2", "micro_batch": 4, "gpus": 8,
        "checkpointing": False, "hours": hours, "tokens_per_second": 9, "fits": True,
    }  # fmt: skip
    above = {"simulated": None, "formula": 99e9, "micro_batch": 8, "fits": False}
    says = of_plan({"best": best, "above": above, "gpu": {"name": "h100"}}).says
    assert says.startswith("Fits 8 x h100: training.parallel=fsdp2 training.micro_batch=4")
    assert "61.2 GB per GPU" in says and words in says
    assert says.endswith("micro_batch 8 does not: 99.0 GB.")


def test_runs_that_validate_on_other_tokens_are_not_compared(tmp_path):
    """Nats are per token: of another tokenizer or another text they are of other things."""

    def runs(*sums):
        return [
            made_run(tmp_path / f"{n}-{sums}" / arm, data={"text_sha256": text} if text else {})
            for n, (arm, text) in enumerate(zip(("linear", "xmoe"), sums, strict=True))
        ]

    other = "Runs are validated on other tokens than each other: nothing is compared."
    assert of_runs(runs("a b", "a c")).says == other
    for alike in (("a b", "d b"), ("a b", None)):  # other training text; a run of before
        assert of_runs(runs(*alike)).says.startswith("One seed ranks nothing")
