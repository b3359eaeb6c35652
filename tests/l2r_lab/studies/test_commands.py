"""compare and sweep run their cells alike and end alike; cells are named alike."""

import signal
from pathlib import Path

import pytest

from l2r.cli import main
from l2r_lab.studies.cells import folder_cells, grid_cells, read_grid
from l2r_lab.studies.train_cells import Outcome, run_cells

COMMANDS = [
    ["compare", "demo", "--routers", "linear,l2r_sips"],
    ["sweep", "demo/l2r-sips", "--grid", "router.rank=2,8"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ({"signal": signal.SIGTERM}, 143, "stopped; the same command goes on from what was saved"),
        ({"error": "no memory"}, 1, "runs failed; the same command tries them again"),
    ],
    ids=["signal", "error"],
)
def test_every_command_ends_alike(
    command, ending, code, words, monkeypatch, tmp_path, capsys
) -> None:
    def end(cells, root, **options):
        for cell in cells:
            yield Outcome(cell, cell.run(root), **ending)

    monkeypatch.setattr("l2r_lab.studies.train_cells.run_cells", end)
    with pytest.raises(SystemExit) as done:
        main([*command, "--out", str(tmp_path)])
    captured = capsys.readouterr()
    assert done.value.code == code and captured.out == ""
    assert captured.err.splitlines()[-1].endswith(words)
    assert ("failed: " in captured.err) == ("error" in ending)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_the_command_under_torchrun_is_refused(command, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as done:
        main([*command, "--out", str(tmp_path)])
    assert done.value.code == 2 and not list(tmp_path.iterdir())
    assert '--launch "torchrun --nproc-per-node N"' in capsys.readouterr().err


def test_seeds_have_one_name_and_the_first_of_a_comparison_has_none():
    cells = folder_cells("demo", ["seed=3"], ["l2r_sips", "linear"], 2)
    assert [cell.name for cell in cells] == [
        "l2r_sips",
        "linear",
        "l2r_sips.seed-4",
        "linear.seed-4",
    ]
    assert [cell.recipe.seed for cell in cells] == [3, 3, 4, 4]
    (cell,) = grid_cells("demo/l2r-sips", [], read_grid(["router.rank=2"]), 1)
    assert cell.name == "rank=2.seed-0"


def test_a_folder_compares_its_routers_and_not_their_ablations():
    six = ["linear", "linear_sips", "xmoe", "l2r_dot", "l2r_cosine", "l2r_sips"]
    names = {
        folder: [cell.name for cell in folder_cells(folder, [], None, 1)]
        for folder in ("demo", "olmoe-1b-7b", "vit-s", "small", "zoo")
    }
    assert names["demo"] == [*six, "l2r_sips_tuned"]
    assert names["olmoe-1b-7b"] == names["vit-s"] == names["small"] == six
    assert names["zoo"] == [
        "linear",
        "l2r_sips",
        "attention",
        "low_rank",
        "mixture",
        "perturbed_cosine",
        "product_keys",
        "sigmoid",
    ]
    (tuned,) = folder_cells("demo", [], ["l2r_sips_tuned"], 1)
    assert tuned.recipe.router.rank == 8
    with pytest.raises(ValueError, match=r"routers must be among linear, .*; got 'l2r_sips_best'"):
        folder_cells("demo", [], ["l2r_sips_best"], 1)
    for change in ("router.kind=xmoe", "router={kind: xmoe}"):
        with pytest.raises(ValueError, match=r"router\.kind differs between the recipes .*--rout"):
            folder_cells("demo", [change], None, 1)
    assert len(folder_cells("demo", ["router={normalize_weights: true}"], None, 1)) == 7


def test_a_folder_with_an_unreadable_recipe_fails_alone(tmp_path: Path) -> None:
    cells = folder_cells("demo", ["training.steps=1"], ["linear"], 1)
    run = cells[0].run(tmp_path)
    run.create()
    run.recipe.write_text("task: language\n")
    (outcome,) = run_cells(cells, tmp_path, show_progress=False)
    assert outcome.error is not None and "training: Field required" in outcome.error
    assert "\n" not in outcome.error
