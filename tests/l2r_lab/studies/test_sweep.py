"""Sweeps: which cells a grid has, what is trained again, what a failure costs, the tables."""

import json
import os
import signal
import statistics
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from l2r.cli import main
from l2r.files.final_losses import last_tenth
from l2r.files.folder import RunFolder
from l2r.stats.intervals import Interval
from l2r_lab.report.ablation import Row, ablation_curves, ablation_table, ablations, final_numbers
from l2r_lab.report.curves import HEALTH_PANELS, LANGUAGE_PANELS, curve_sections, curves
from l2r_lab.report.sweep import write_sweep_page
from l2r_lab.studies import train_cells as running
from l2r_lab.studies.cells import folder_cells, grid_cells, read_grid
from l2r_lab.studies.train_cells import is_finished, run_cells
from l2r_lab.training import loop
from l2r_lab.training.recipes.load import load_recipe

RECIPE = "demo/l2r-sips"


def plan(changes, *axes, seeds=1):
    return grid_cells(RECIPE, changes, read_grid(axes), seeds)


def command(capsys, *args):
    with pytest.raises(SystemExit) as done:
        main(["sweep", RECIPE, *map(str, args)])
    captured = capsys.readouterr()
    return done.value.code, captured.out, captured.err


def watch_steps(monkeypatch, watch):
    """Call ``watch`` with the name of the run and the number of every step of the sweep."""

    def train(recipe, folder, **options):
        name = RunFolder(folder).name
        return loop.train(recipe, folder, on_step=lambda step: watch(name, step), **options)

    monkeypatch.setattr(running, "train", train)


def test_a_grid_is_every_choice_with_every_seed():
    cells = plan(["seed=5"], "router.rank=2,8", "router.heads=1,4,16", seeds=2)
    names = [cell.name for cell in cells]
    assert len(names) == 12 and names[0] == "rank=2,heads=1.seed-5"
    assert names[-1] == "rank=8,heads=16.seed-6"
    routers = {(c.recipe.router.rank, c.recipe.router.heads) for c in cells}
    assert routers == {(r, h) for r in (2, 8) for h in (1, 4, 16)}
    assert {cell.recipe.seed for cell in cells} == {5, 6}


def test_a_router_without_an_option_is_trained_once():
    cells = plan([], "router.kind=linear,l2r_sips", "router.rank=2,8,32")
    assert [cell.name for cell in cells] == [
        "kind=linear.seed-0",
        "kind=l2r_sips,rank=2.seed-0",
        "kind=l2r_sips,rank=8.seed-0",
        "kind=l2r_sips,rank=32.seed-0",
    ]
    assert cells[0].recipe.router.kind == "linear"
    assert cells[2].recipe.router.rank == 8


def test_values_are_yaml_and_equal_endings_keep_their_section():
    cells = plan([], "losses.z=0,1e-3", "optimizer.betas=[0.9, 0.95],[0.8, 0.9]")
    assert cells[3].recipe.losses.z == 0.001 and cells[3].recipe.optimizer.betas == (0.8, 0.9)
    assert cells[3].name == "z=1e-3,betas=0.8-0.9.seed-0"
    cells = plan([], "evaluation.every=1", "checkpoint.every=2")
    assert cells[0].name == "evaluation.every=1,checkpoint.every=2.seed-0"


def test_vision_recipes_keep_the_papers_vision_settings():
    cells = grid_cells("vit-s/l2r-sips", [], read_grid(["router.heads=1,8"]), 1)
    alone = load_recipe("vit-s/l2r-sips", ["router.heads=8"])
    assert cells[1].recipe == alone and cells[1].name == "heads=8.seed-0"


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ([], "grid is missing"),
        (["router.rank"], "grid must look like key.sub=value,value; got 'router.rank'"),
        (["router.rank=2", "router.rank=8"], "router.rank twice"),
        (["seed=1,2"], "use --seeds"),
        (["router.rank=2,2"], "needs different values"),
        (["router.rank="], "at least one"),
        (["router.rank=[2"], "not valid YAML"),
        (["router.rnk=2,8"], r"l2r_sips has no option 'rnk' \(did you mean 'rank'\?\)"),
        (["router.kind=linear", "router.rank=2"], "linear has no option 'rank'"),
        (["router.kind=linear,l2r_sip"], "unknown router 'l2r_sip'"),
        (["router.rank=0,2"], "rank must be >= 1"),
        (["training.stps=5,6"], r"unknown field training.stps \(did you mean 'steps'\?\)"),
        (["trainig.steps=5"], "unknown field trainig .did you mean 'training'"),
        (["data.corpus=a/b,a-b"], "two cells one folder name"),
    ],
)
def test_bad_grids_are_refused_in_one_line_before_training(axes, message):
    with pytest.raises(ValueError, match=message) as error:
        plan([], *axes)
    assert "\n" not in str(error.value)


@pytest.mark.slow("a chain of trainings")
def test_a_sweep_survives_a_failure_resumes_it_and_prints_the_papers_tables(
    capsys, tiny_changes, tmp_path, monkeypatch
):
    changes = [*tiny_changes, "training.steps=4", "checkpoint.every=1"]
    grid = ["--grid", "router.kind=linear,l2r_sips", "--grid", "router.rank=2,4", "--seeds", "2"]
    args = [*changes, *grid, "--out", tmp_path]
    broken = "kind=l2r_sips,rank=2.seed-1"

    def failing(name, step):
        if name == broken and step == 2:
            raise torch.OutOfMemoryError("out of memory\nmore lines")

    watch_steps(monkeypatch, failing)
    code, out, err = command(capsys, *args, "--json")
    assert code == 1
    assert f"failed: {broken}: out of memory more lines" in err and "1 of 6 runs failed" in err
    assert [row["seeds"] for row in json.loads(out)] == [2, 1, 2]
    assert "out of memory more lines" in (tmp_path / "report.html").read_text()
    monkeypatch.undo()

    code, out, _ = command(capsys, *args, "--show", "--json")
    states = {row["cell"]: (row["state"], row["last step"]) for row in json.loads(out)}
    assert code == 0 and states.pop(broken) == ("unfinished", 2)
    assert set(states.values()) == {("finished", 4)}

    steps = []
    watch_steps(monkeypatch, lambda name, step: steps.append((name, step)))
    code, out, err = command(capsys, *args)
    assert code == 0 and steps == [(broken, 2), (broken, 3)]
    assert "Varying rank with l2r_sips" in out and "All cells" in out and "±" in out
    monkeypatch.undo()
    alone = load_recipe(RECIPE, [*changes, "router.rank=2", "seed=1"])
    loop.train(alone, tmp_path / "alone", show_progress=False)
    one, two = (load_file(tmp_path / n / "model" / "model.safetensors") for n in ("alone", broken))
    assert all(torch.equal(one[name], two[name]) for name in one)

    rows = json.loads(command(capsys, *args, "--json")[1])
    assert [(row["router.kind"], row["router.rank"]) for row in rows] == [
        ("linear", None),
        ("l2r_sips", 2),
        ("l2r_sips", 4),
    ]
    assert rows[0]["router params"] == 2 * 8 * 32
    losses = [
        RunFolder(tmp_path / f"kind=linear.seed-{s}").read_metrics("validation")[-1]["ce/mean"]
        for s in (0, 1)
    ]
    half = 12.706204736 * statistics.stdev(losses) / 2**0.5
    assert rows[0]["val CE"] == pytest.approx(statistics.fmean(losses), rel=1e-9)
    assert rows[0]["val CE high"] - rows[0]["val CE"] == pytest.approx(half, rel=1e-4)
    page = (tmp_path / "report.html").read_text()
    shown = ("Varying rank with l2r_sips", "Training dynamics", "Load-balance loss")
    for words in (*shown, "Expert usage: varying rank with l2r_sips", "Importance (mean"):
        assert words in page
    assert "MMLU accuracy" not in page and "Failed cells" not in page
    assert code == 0 and command(capsys, *changes, "--out", tmp_path)[0] == 2


def test_a_signal_stops_the_whole_sweep(tiny_changes, tmp_path, monkeypatch):
    def stopped(name, step):
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    watch_steps(monkeypatch, stopped)
    cells = plan(tiny_changes, "router.rank=2,4")
    outcomes = list(run_cells(cells, tmp_path, show_progress=False))
    assert [(o.cell.name, o.signal) for o in outcomes] == [("rank=2.seed-0", signal.SIGTERM)]
    assert outcomes[0].run.complete_checkpoints()
    assert not is_finished(outcomes[0].run, cells[0].recipe)


def test_finished_runs_of_other_folders_are_cells_and_are_not_trained_again(
    capsys, tiny_changes, tmp_path, monkeypatch
):
    """As the paper's two ablations share (r 2, H 4), and one has the main run."""
    changes = [*tiny_changes, "training.steps=2"]
    main_run, root = tmp_path / "runs" / "l2r-sips", tmp_path / "heads"
    loop.train(load_recipe(RECIPE, [*changes, "router.heads=2"]), main_run, show_progress=False)
    other = load_recipe(RECIPE, [*changes, "router.heads=4", "seed=1"])  # another seed: not it
    loop.train(other, tmp_path / "runs" / "other", show_progress=False)
    trained = []
    watch_steps(monkeypatch, lambda name, step: trained.append((name, step)))
    args = [*changes, "--grid", "router.heads=2,4", "--out", root, "--processes", 1]
    args += ["--reuse", tmp_path / "runs", "--no-usage"]
    shown = json.loads(command(capsys, *args, "--show", "--json")[1])
    assert [row["state"] for row in shown] == [f"finished in {main_run}", "new"]
    code, out, err = command(capsys, *args, "--tasks", "piqa", "--requests", 8, "--json")
    assert code == 0, err
    assert trained == [("heads=4.seed-0", 0), ("heads=4.seed-0", 1)]
    assert not (root / "heads=2.seed-0").exists()
    rows = json.loads(out)
    own, made = (RunFolder(f).read_json(f / "evaluation.json")
                 for f in (main_run, root / "heads=4.seed-0"))  # fmt: skip
    assert [row["router.heads"] for row in rows] == [2, 4]
    assert [row["PIQA"] for row in rows] == [r["accuracy"]["PIQA"] for r in (own, made)]
    assert own["tasks"]["piqa"]["documents"] == 4  # two answers each

    before = (main_run / "evaluation.json").stat().st_mtime_ns
    again = command(capsys, *args, "--tasks", "piqa", "--requests", 8, "--json")
    assert json.loads(again[1]) == rows and len(trained) == 2
    assert (main_run / "evaluation.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--reuse", "nowhere"], "--reuse must be a file or a folder that exists; got nowhere"),
        (["--requests", "8"], "requests goes with --tasks"),
        (["--tasks", "piq"], "did you mean 'piqa'"),
    ],
)
def test_options_of_a_sweep_are_refused_before_training(args, words, capsys, tmp_path):
    grid = ["--grid", "router.heads=2,4", "--out", tmp_path / "out"]
    code, _, err = command(capsys, *grid, *args)
    assert code == 2 and words in err and not (tmp_path / "out").exists()


def test_a_launcher_beside_python_is_found_without_an_activated_environment(
    tiny_changes, tmp_path, monkeypatch
):
    bin_folder = tmp_path / "environment" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "launch-here").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(bin_folder / "python"))
    seen = []

    def run_processes(words):
        seen.append(words)
        return {}, None

    monkeypatch.setattr(running, "run_processes", run_processes)
    cells = plan(tiny_changes, "router.rank=2")
    (done,) = run_cells(cells, tmp_path / "out", launch="launch-here --standalone")
    assert done.error is None
    assert seen[0][:2] == [str(bin_folder / "launch-here"), "--standalone"]


@pytest.mark.slow("fresh processes")
def test_cells_can_be_processes_of_their_own(tiny_changes, tmp_path):
    cells = plan([*tiny_changes, "training.steps=2"], "router.rank=2")
    (failed,) = run_cells(cells, tmp_path, launch="false")
    assert failed.error == "its process ended with code 1"
    (done,) = run_cells(cells, tmp_path, launch=sys.executable)
    assert done.error is None and is_finished(done.run, cells[0].recipe)
    (again,) = run_cells(cells, tmp_path, launch="false")
    assert again.error is None and not again.trained


@pytest.mark.slow("a fresh process")
def test_a_cell_on_images_of_ones_own_is_a_process_of_its_own(tmp_path):
    """The recipe leaves sizes to the images; the process reads it from the folder."""
    for part in ("train", "val"):
        for name in ("dark", "bright"):
            (tmp_path / part / name).mkdir(parents=True)
            for n in range(4):
                pixels = np.full((10, 10, 3), 40 + 3 * n if name == "dark" else 200, np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{n}.png")
    changes = [f"data.images={tmp_path}", "training.steps=1", "training.epochs=null"]
    changes += ["training.global_batch=4", "training.micro_batch=4", "data.workers=0"]
    cells = folder_cells("demo-vision", changes, ["linear"], 1)
    (done,) = run_cells(cells, tmp_path / "runs", launch=sys.executable)
    assert done.error is None and is_finished(done.run, cells[0].recipe)


def test_a_router_that_is_named_twice_is_trained_once():
    cells = folder_cells("demo", [], ["linear", "l2r-sips", "linear"], 1)
    assert [cell.name for cell in cells] == ["linear", "l2r_sips"]


def finished_run(folder, *, mmlu, loss=3.0):
    """A run folder with the numbers that a long run would have."""
    run = RunFolder(folder)
    run.create()
    for step in range(1, 21):
        run.append_metrics(
            {"kind": "train", "step": step, "tokens": step, "ce": loss, "balance": 8.0}
        )
    run.append_metrics({"kind": "validation", "step": 20, "tokens": 20, "ce/mean": loss + 0.1})
    run.append_metrics(
        {"kind": "tasks", "step": 20, "tokens": 20, "mmlu": mmlu, "hellaswag": 0.4, "overall": 0.43}
    )
    return run


def test_heads_table_has_the_papers_layout(tmp_path):
    rows = []
    for heads, size in ((1, 100_352), (16, 131_072)):
        run, again = (finished_run(tmp_path / f"{heads}-{i}", mmlu=0.276) for i in range(2))
        numbers = {c: Interval(v, v - 0.5, v + 0.5) for c, v in final_numbers(run).items()}
        settings = {"router.rank": 2, "router.heads": heads}
        rows.append(Row(settings, [run, again], numbers, size, 16 * 64 * 2048))
    (found,) = ablations(rows)
    assert found.title == "Varying heads with rank 2"
    table = ablation_table(found)
    assert table.columns[:4] == ("H", "Router params", "MMLU", "HSwag")
    assert table.rows[1][:4] == ("16", "131.072K (6.25%)", "27.6 ± 0.5", "40.0 ± 0.5")
    assert "BoolQ" not in table.columns and "Overall" in table.columns
    figure = ablation_curves([found], "tokens")
    assert [line.name for line in figure.data] == ["heads 1", "heads 16"]
    assert list(figure.data[0].y) == [3.0] * 20


def test_rank_table_has_no_size_column(tmp_path):
    rows = [
        Row({"router.rank": rank}, [finished_run(tmp_path / f"{rank}", mmlu=0.25)], {})
        for rank in (2, 8)
    ]
    assert ablation_table(ablations(rows)[0]).columns == ("Rank",)


def test_a_run_ends_with_every_step_of_its_last_tenth(tmp_path):
    run = RunFolder(tmp_path)
    run.create()
    for step in range(5, 205, 5):  # every fifth step is logged, whatever its own batch was
        place = {"step": step, "tokens": step}
        run.append_metrics({"kind": "train", **place, "ce": 9.0, "balance": float(step)})
    assert last_tenth(run, "ce") == 9.0  # a run of an older version has no more than these
    for step, steps in ((180, 180), (185, 5), (192, 7), (200, 8)):
        place = {"step": step, "tokens": step}
        run.append_metrics({"kind": "train_mean", **place, "ce": step / 100, "steps": steps})
    assert last_tenth(run, "ce") == pytest.approx((5 * 1.85 + 7 * 1.92 + 8 * 2) / 20)
    assert last_tenth(run, "balance") == pytest.approx((185 + 190 + 195 + 200) / 4)
    assert last_tenth(run, "z") is None
    figure = curves({"a": [run]}, LANGUAGE_PANELS, "tokens")
    assert list(figure.data[0].y) == [1.8, 1.85, 1.92, 2.0]


def test_metrics_are_parsed_once_for_a_page_and_again_when_they_grow(tmp_path, monkeypatch):
    rows = [
        Row({"router.rank": rank}, [finished_run(tmp_path / f"{rank}", mmlu=0.25)], {})
        for rank in (2, 8)
    ]
    parses = []
    parse = RunFolder._parse_metrics
    monkeypatch.setattr(
        RunFolder, "_parse_metrics", lambda run: parses.append(run.name) or parse(run)
    )
    write_sweep_page(rows, tmp_path / "page.html", failed={})
    assert sorted(parses) == ["2", "8"]
    run = rows[0].runs[0]
    before = len(run.read_metrics())
    run.append_metrics({"kind": "train", "step": 21, "tokens": 21, "ce": 1.0})
    assert len(run.read_metrics()) == before + 1


def test_the_c4_panel_stands_beside_the_mean_of_the_domains(tmp_path):
    run = finished_run(tmp_path, mmlu=0.25)
    assert "C4" not in str(curves({"a": [run]}, LANGUAGE_PANELS, "tokens").layout)
    for step in (21, 22):
        place = {"kind": "validation", "step": step, "tokens": step}
        run.append_metrics({**place, "ce/mean": 3, "ce/c4": 4})
    assert "C4 validation" in str(curves({"a": [run]}, LANGUAGE_PANELS, "tokens").layout)


def test_a_section_of_curves_that_no_run_has_is_left_out(tmp_path):
    run = RunFolder(tmp_path)
    run.create()
    run.append_metrics({"kind": "train", "step": 1, "tokens": 5, "ce": 4.0})
    titles = {
        "Training": LANGUAGE_PANELS,
        "Routing health": HEALTH_PANELS,  # of runs without losses of the router
    }
    sections = [
        s for t, p in titles.items() for s in curve_sections(t, "", {"a": [run]}, p, "tokens")
    ]
    assert [section.title for section in sections] == ["Training"]


def test_a_full_evaluation_replaces_the_one_in_training(tmp_path):
    run = finished_run(tmp_path, mmlu=0.25)
    assert final_numbers(run)["MMLU"] == pytest.approx(25.0)
    run.write_json(run.evaluation, {"accuracy": {"MMLU": 31.5, "HSwag": None}})
    numbers = final_numbers(run)
    assert numbers["MMLU"] == 31.5 and numbers["HSwag"] == pytest.approx(40.0)
    assert numbers["train CE"] == 3.0 and numbers["val CE"] == 3.1
