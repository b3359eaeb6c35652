"""One walk over jobs by several processes: each job once, in order, and what a kill leaves."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from l2r.files.atomic import try_lock
from l2r.files.folder import RunFolder
from l2r_lab.studies import running, train_cells
from l2r_lab.studies.cells import grid_cells, read_grid
from l2r_lab.studies.running import (
    LOCKS,
    Ended,
    Job,
    read_mark,
    run_processes,
    shares,
    suitable_processes,
    walk,
)
from l2r_lab.studies.train_cells import run_cells, share_cells

SHARE = "0f" * 8


def jobs_of(done, *words, ending=None):
    """Jobs that note their names; of a name in ``ending``, the end that it has."""

    def work(word):
        done.append(word)
        return (ending or {}).get(word, Ended(True))

    return [Job(word, lambda word=word: work(word)) for word in words]


def test_every_job_is_done_once_by_whoever_comes_first(tmp_path):
    done = []
    jobs = jobs_of(done, "a", "b", "c", ending={"b": Ended(error="no memory")})
    first = walk(jobs, tmp_path / LOCKS, share=SHARE)
    assert next(first)[0].name == "a"  # and holds its lock while the caller looks at its end
    assert [job.name for job, _ in walk(jobs, tmp_path / LOCKS, share=SHARE)] == ["b", "c"]
    assert list(first) == [] and done == ["a", "b", "c"]
    marks = [read_mark(tmp_path / LOCKS, name, SHARE) for name in done]
    assert marks == [{"share": SHARE, "ended": e} for e in (
        [True, None, None], [False, "no memory", None], [True, None, None])]  # fmt: skip
    assert read_mark(tmp_path / LOCKS, "a", "another command") is None
    assert len(list(walk(jobs, tmp_path / LOCKS, share="another command"))) == 3


def test_what_another_process_holds_is_left_to_it_and_limits_count_what_was_done(tmp_path):
    done = []
    jobs = jobs_of(done, "a", "b", "c", "d", ending={"b": None})
    (tmp_path / LOCKS).mkdir()
    with try_lock(tmp_path / LOCKS / "a"):
        ends = list(walk(jobs, tmp_path / LOCKS, limit=1))
    assert [job.name for job, _ in ends] == ["c"] and done == ["b", "c"]  # b had nothing to do


def test_a_signal_ends_the_walk(tmp_path):
    done = []
    jobs = jobs_of(done, "a", "b", ending={"a": Ended(True, signal=signal.SIGTERM)})
    assert len(list(walk(jobs, tmp_path / LOCKS))) == 1 and done == ["a"]


def test_a_process_whose_starter_is_gone_takes_no_other_job(tmp_path, monkeypatch):
    done = []
    jobs = jobs_of(done, "a", "b")
    for options, expected in (({"limit": 9}, 1), ({"share": SHARE}, 1), ({}, 2)):
        done.clear()
        parents = iter([1, 1, 2, 2])
        monkeypatch.setattr(os, "getppid", lambda parents=parents: next(parents))
        assert len(list(walk(jobs, tmp_path / str(expected), **options))) == expected == len(done)


def test_a_job_of_more_threads_waits_for_those_before_it(tmp_path, monkeypatch):
    threads, order = [], []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    jobs = [Job(n, lambda n=n: order.append(n), t) for n, t in (("a", 1), ("b", 1), ("c", 2))]
    (tmp_path / LOCKS).mkdir()
    with try_lock(tmp_path / LOCKS / "a"):
        other = threading.Thread(target=lambda: list(walk(jobs, tmp_path / LOCKS)))
        other.start()
        time.sleep(0.3)
        assert order == ["b"] and threads == [1]
    other.join()
    assert order == ["b", "c"] and threads == [1, 2]


def process_of(code):
    return [sys.executable, "-c", f"import os, signal, sys, time\n{code}"]


def test_lines_are_handed_on_and_a_process_that_dies_is_replaced(tmp_path):
    code = (
        f"path = {str(tmp_path)!r} + '/first'\n"
        "print('one', flush=True)\n"
        "if not os.path.exists(path):\n"
        "    open(path, 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('two', file=sys.stderr)"
    )
    lines = []
    codes, number = run_processes(process_of(code), say=lines.append, replacements=1)
    assert list(codes.values()) == [-signal.SIGKILL, 0] and number is None
    assert lines == ["one", "one", "two"]
    (tmp_path / "first").unlink()
    codes, _ = run_processes(process_of(code), say=lines.append)
    assert list(codes.values()) == [-signal.SIGKILL]


def test_after_an_error_that_all_would_meet_the_others_save(tmp_path):
    code = (
        "try:\n"
        f"    os.mkdir({str(tmp_path / 'first')!r})\n"
        "except OSError:\n"
        "    while not os.path.exists('second'): time.sleep(0.01)\n"
        "    sys.exit(2)\n"
        "def save(*_):\n"
        "    open('saved', 'w').close()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open('second', 'w').close()\n"
        "time.sleep(60)"
    )
    code = f"os.chdir({str(tmp_path)!r})\n" + code
    codes, number = run_processes(process_of(code), 2, fatal=(2,), replacements=9)
    assert sorted(codes.values()) == [0, 2] and number is None and (tmp_path / "saved").exists()


def test_all_but_the_first_wait_until_it_has_begun(tmp_path):
    code = f"open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w').close(); time.sleep(0.5)"
    seen = []

    def ready():
        seen.append(len(list(tmp_path.iterdir())))
        return len(seen) > 2

    codes, _ = run_processes(process_of(code), 2, poll=ready)
    assert max(seen[:2]) <= 1 and len(codes) == 2 == len(list(tmp_path.iterdir()))


@pytest.fixture
def four(tmp_path):
    return grid_cells("demo/l2r-sips", [], read_grid(["router.rank=1,2,4,8"]), 1)


def together(monkeypatch, cells, root, marks, codes, number=None):
    """Outcomes and lines where processes ended so; the command and options they were started by."""
    started, lines = [], []

    def run(command, processes, **options):
        started.append((command, processes))
        share = command[command.index("--worker-of") + 1]
        (root / LOCKS).mkdir(exist_ok=True)
        for cell, mark in zip(cells, marks, strict=False):
            (root / LOCKS / cell.name).write_text(json.dumps({"share": share, **mark}))
        return codes, number

    monkeypatch.setattr(train_cells, "run_processes", run)
    options = {"report": lines.append, "show_progress": False}
    ends = share_cells(["sweep", "x"], cells, root, 2, **options)
    return [o[2:] for o in map(tuple_of, ends)], lines, started


def tuple_of(outcome):
    return outcome.cell, outcome.run, outcome.trained, outcome.error, outcome.signal


def test_ends_of_all_cells_are_told_in_their_order(monkeypatch, four, tmp_path):
    marks = [{"ended": [True, None, None]}, {"pid": 7}, {"ended": [False, "loss is NaN", None]}]
    ends, lines, ((command, processes),) = together(
        monkeypatch, four, tmp_path, marks, {7: -9, 8: 0}
    )
    in_use = f"output folder {tmp_path / 'rank=8.seed-0'} is in use by another run"
    died = "its process ended with code -9"
    ok, nan = (True, None, None), (False, "loss is NaN", None)
    assert ends == [ok, (True, died, None), nan, (False, in_use, None)]
    assert lines == [f"failed: rank=2.seed-0: {died}", f"failed: rank=8.seed-0: {in_use}"]
    assert processes == 2 and command[1:5] == ["-m", "l2r", "sweep", "x"]
    assert command[-2:] == ["--processes", "2"]


def test_a_signal_and_an_error_of_all_end_the_command(monkeypatch, four, tmp_path):
    ends, lines, _ = together(monkeypatch, four, tmp_path, [], {7: 143}, signal.SIGTERM)
    assert ends == [(False, None, signal.SIGTERM)] and not lines
    for code in (2, 70):
        with pytest.raises(SystemExit) as done:
            together(monkeypatch, four, tmp_path, [], {7: 0, 8: code})
        assert done.value.code == code


def test_no_process_is_started_for_cells_that_are_finished(monkeypatch, four, tmp_path):
    monkeypatch.setattr(train_cells, "is_finished", lambda run, recipe: True)
    ends, _, started = together(monkeypatch, four, tmp_path, [], {})
    assert ends == [(False, None, None)] * 4 and not started
    unfinished = four[-1]
    monkeypatch.setattr(train_cells, "is_finished", lambda run, r: r != unfinished.recipe)
    _, _, ((_, processes),) = together(monkeypatch, four, tmp_path, [], {})
    assert processes == 1


def test_bars_show_runs_that_go_on(four, tmp_path):
    (tmp_path / LOCKS).mkdir()
    with train_cells.progress_bar(show=False) as progress:
        bars = train_cells._Bars(progress, four, tmp_path, SHARE)
        assert not bars.update()
        (tmp_path / LOCKS / four[1].name).write_text(json.dumps({"share": SHARE, "pid": 1}))
        assert not bars.update()
        run = four[1].run(tmp_path)
        run.create()
        run.write_json(run.environment, {"steps": 40})
        numbers = {"tokens": 9, "ce": 2.5, "per_second": 1234.0}
        for step in range(200):
            run.append_metrics({"kind": "train", "step": step, **numbers})
        run.append_metrics({"kind": "train_mean", "step": 200, "ce": 3.0})
        assert bars.update()
        (task,) = progress.tasks
        assert task.description == "[2/4] rank=2.seed-0" and task.total == 40
        assert task.completed == 199 and task.fields["numbers"] == "loss 2.500  1,234 tokens/s"
        mark = {"share": SHARE, "ended": [True, None, None]}
        (tmp_path / LOCKS / four[1].name).write_text(json.dumps(mark))
        assert bars.update() and not progress.tasks


def test_a_run_that_another_process_trains_is_refused(four, tmp_path):
    (tmp_path / LOCKS).mkdir()
    with try_lock(tmp_path / LOCKS / four[0].name):
        (outcome,) = run_cells(four[:1], tmp_path, show_progress=False)
    assert outcome.error == f"output folder {outcome.run.path} is in use by another run"


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
    monkeypatch.setattr(running, "available_memory", lambda: gigabytes * 2**30)
    assert suitable_processes(jobs) == expected
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert suitable_processes(jobs) == 1


@pytest.mark.slow("fresh processes")
def test_a_process_of_a_sweep_that_is_killed_loses_its_own_run_alone(tiny_changes, tmp_path):
    changes = [*tiny_changes, "checkpoint.every=0"]
    command = [sys.executable, "-m", "l2r", "sweep", "demo/l2r-sips", *changes, "--processes", "2"]
    command += ["--grid", "training.steps=100000,3,4", "--no-usage", "--out", str(tmp_path)]
    options = {"stderr": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **options) as process:
        first = RunFolder(tmp_path / "steps=100000.seed-0")
        while not first.read_metrics("train"):
            assert process.poll() is None
            time.sleep(0.02)
        mark = json.loads((tmp_path / LOCKS / first.path.name).read_text())
        os.kill(mark["pid"], signal.SIGKILL)
        _, err = process.communicate()
    assert process.returncode == 1, err
    assert "failed: steps=100000.seed-0: its process ended with code -9" in err.splitlines()
    assert err.splitlines()[-1] == "1 of 3 runs failed; the same command tries them again"
    assert all(RunFolder(tmp_path / f"steps={n}.seed-0").is_finished() for n in (3, 4))
    assert any(line.startswith("[2/3] steps=3.seed-0 ") and " 3/3 " in line
               for line in err.splitlines())  # fmt: skip


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
