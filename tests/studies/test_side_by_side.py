"""Runs side by side end, are shown and save as runs after one another do."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from l2r.runs.folder import RunFolder
from l2r.studies import side_by_side
from l2r.studies.cells import grid_cells, read_grid
from l2r.studies.side_by_side import Job, shares, suitable_processes, train_side_by_side
from l2r.studies.train_cells import run_cells
from tests.studies.side_by_side_jobs import take


def together(folder, *words, processes=2):
    """Lines that were reported, and how each job ended, by its word."""
    lines, ended = [], {}
    threads = shares(len(words), processes)
    jobs = [Job((w, folder), f"[{n + 1}] {w}", threads[n]) for n, w in enumerate(words)]
    options = {"report": lines.append, "show_progress": True}
    for position, end in train_side_by_side(take, jobs, processes, **options):
        ended[words[position]] = end
    return lines, ended


@pytest.mark.slow("fresh processes")
def test_a_bad_run_is_one_line_and_the_last_gets_all_threads(tmp_path, capsys):
    torch.set_num_threads(2)
    words = ("fail", "one", "crash", "two", "three")
    lines, ended = together(tmp_path, *words)
    assert ended == {
        "fail": (False, "loss is NaN", None),
        "crash": (True, "its process ended with code 3", None),
        **dict.fromkeys(("one", "two", "three"), (True, None, None)),
    }
    assert set(lines) == {f"preparing {word}" for word in words} and lines[0] == "preparing fail"
    shown = capsys.readouterr().err.splitlines()
    for number, word in ((2, "one"), (4, "two"), (5, "three")):
        (bar,) = (line for line in shown if line.startswith(f"[{number}] {word} "))
        assert " 2/2 done " in bar and f"saving {word}" in shown
    assert [(tmp_path / word).read_text() for word in ("one", "three")] == ["1", "2"]


@pytest.mark.slow("fresh processes")
def test_what_a_run_raises_comes_out_when_the_other_has_saved(tmp_path):
    with pytest.raises(ModuleNotFoundError) as error:
        together(tmp_path, "wait 1", "raise", "three")
    assert error.value.name == "wandb"
    assert (tmp_path / "wait 1").is_file() and not (tmp_path / "three").exists()


@pytest.mark.slow("fresh processes")
def test_a_process_that_is_killed_while_it_waits_for_a_job_is_replaced(tmp_path, monkeypatch):
    started, lines, start = [], [], side_by_side._Group._start

    def kept(group):
        started.append(start(group))
        return started[-1]

    def report(line):
        lines.append(line)
        if line == "preparing one":  # the second process has nothing to do yet
            started[1].process.kill()
            started[1].process.join()

    monkeypatch.setattr(side_by_side._Group, "_start", kept)
    jobs = [Job((word, tmp_path), word) for word in ("one", "two", "three")]
    ended = dict(train_side_by_side(take, jobs, 2, report=report, show_progress=False))
    assert ended == dict.fromkeys(range(3), (True, None, None)) and len(started) == 3
    assert sorted(lines) == ["preparing one", "preparing three", "preparing two"]


@pytest.mark.parametrize(
    ("jobs", "processes", "threads", "expected"),
    [
        (7, 2, 2, [1] * 6 + [2]),
        (6, 2, 2, [1] * 6),
        (7, 4, 8, [2] * 4 + [2] * 3),
        (3, 2, 1, [1] * 3),
        (5, 4, 8, [2] * 4 + [8]),
        (1, 1, 4, [4]),
    ],
)
def test_every_run_has_its_share_of_the_threads(monkeypatch, jobs, processes, threads, expected):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert shares(jobs, processes) == expected


@pytest.mark.parametrize(
    ("jobs", "threads", "gigabytes", "expected"),
    [(7, 2, 20, 2), (7, 8, 100, 7), (7, 8, 5, 2), (7, 8, 1, 1), (1, 8, 100, 1), (0, 8, 100, 1)],
)
def test_how_many_processes_suit_a_machine(monkeypatch, jobs, threads, gigabytes, expected):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(side_by_side, "available_memory", lambda: gigabytes * 2**30)
    assert suitable_processes(jobs) == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert suitable_processes(jobs) == 1


@pytest.mark.slow("fresh processes")
def test_a_sweep_side_by_side_is_stopped_resumed_and_equal(tiny_changes, tmp_path):
    changes = [*tiny_changes, "checkpoint.every=0"]
    axis = "training.steps=100000,300,100001"  # the first does not end while the second begins
    command = [sys.executable, "-m", "l2r", "sweep", "demo/l2r-sips", *changes, "--processes", "2"]
    command += ["--grid", axis, "--no-usage", "--out", str(tmp_path / "two")]
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    options = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **options) as process:
        both = [RunFolder(tmp_path / "two" / f"steps={n}.seed-0") for n in (100000, 300)]
        while not all(run.read_metrics("train") for run in both):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, err
    assert err.splitlines()[-1] == "stopped; the same command goes on from what was saved"
    assert all(run.complete_checkpoints() for run in both) and not both[1].is_finished()
    assert not (tmp_path / "two" / "steps=100001.seed-0").exists()
    cell = grid_cells("demo/l2r-sips", changes, read_grid([axis]), 1)[1]
    again, alone = (
        next(run_cells([cell], tmp_path / name, show_progress=False)) for name in ("two", "one")
    )
    assert again.trained and again.run.is_finished()
    assert again.run.read_metrics("validation") == alone.run.read_metrics("validation")
