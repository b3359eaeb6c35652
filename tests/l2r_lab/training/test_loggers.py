"""Loggers: the same numbers by the same names, each step once, and never a reason to stop."""

import importlib.machinery
import re
import sys
import time
import types

import pytest

from l2r.files.folder import RunFolder
from l2r_lab.training import loop
from l2r_lab.training.loggers import Log, check_logger
from l2r_lab.training.monitor import Monitor, progress_bar
from l2r_lab.training.recipes.load import load_recipe

HOSTED = ("wandb", "trackio")
NUMBERS = {"tokens": 64, "ce": 2.5, "load_entropy": [0.5, 0.75]}
TAGS = {"tokens": 64.0, "ce": 2.5, "load_entropy/layer-0": 0.5, "load_entropy/layer-1": 0.75}


class StandIn(types.ModuleType):
    """Takes the place of wandb or trackio and keeps what it is told; ``fails`` names a call."""

    def __init__(self, name, fails=()):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.fails, self.started, self.told, self.finished = fails, [], [], 0

    def init(self, **options):
        self._maybe_fail("init")
        self.started.append(options)
        print("this would be in the way of --json")
        return self

    def log(self, values, *, step):
        self._maybe_fail("log")
        self.told += [(tag, step, value) for tag, value in values.items()]

    def finish(self):
        self._maybe_fail("finish")
        self.finished += 1

    def _maybe_fail(self, call):
        if call in self.fails:
            raise ConnectionError("no way to\nthe network")

    Settings = staticmethod(dict)


@pytest.fixture(params=HOSTED)
def hosted(request, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    module = StandIn(request.param)
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


@pytest.fixture
def folder(tmp_path):
    run = RunFolder(tmp_path / "study" / "l2r_sips")
    run.create()
    run.recipe.write_text("seed: 3\n")
    return run


def by_tag(records):
    """What a logger must know of metrics.jsonl: (tag, step) -> value."""
    found = {}
    for record in records:
        for name, value in record.items():
            values = value if isinstance(value, list) else [value]
            for layer, number in enumerate(values):
                if name not in ("kind", "step"):
                    tag = f"{record['kind']}/{name}"
                    tag += f"/layer-{layer}" if len(values) > 1 else ""
                    found[tag, record["step"]] = number
    return found


def in_tensorboard(run):
    """(tag, step) and value of every point that TensorBoard would draw."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard"
    ).EventAccumulator(str(run.tensorboard))
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return [(tag, event.step, event.value) for tag in tags for event in accumulator.Scalars(tag)]


def test_a_logger_is_told_names_steps_and_who_the_run_is(hosted, folder, capsys):
    log = Log(hosted.__name__, folder, 0, set(), pytest.fail)
    log.record("train", 7, NUMBERS)
    log.close()
    log.close()
    assert hosted.told == [(f"train/{tag}", 7, value) for tag, value in TAGS.items()]
    assert hosted.finished == 1
    (options,) = hosted.started
    assert (options["project"], options["group"]) == ("l2r", "study")
    assert options["config"] == {"seed": 3} and options["resume"] == "allow"
    assert options["name"].startswith("l2r_sips")
    assert capsys.readouterr().out == ""


def test_a_resumed_run_is_the_same_run_and_repeats_nothing(hosted, folder):
    name = hosted.__name__
    Log(name, folder, 0, {("train", 1)}, pytest.fail).record("train", 1, NUMBERS)
    known = {("train", 1), ("train", 2)}
    again = Log(name, folder, 0, known, pytest.fail)
    for step in (1, 2, 3):
        again.record("train", step, NUMBERS)
        again.record("validation", step, NUMBERS)
    steps = [(tag, step) for tag, step, _ in hosted.told if tag.endswith("/ce")]
    validation = [("validation/ce", step) for step in (1, 2, 3)]
    assert sorted(steps) == [("train/ce", 1), ("train/ce", 3), *validation]
    key = "id" if name == "wandb" else "name"
    assert hosted.started[0][key] == hosted.started[1][key]


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_logger_that_fails_says_so_once(hosted, folder, call):
    hosted.fails, lines = (call,), []
    log = Log(hosted.__name__, folder, 0, set(), lines.append)
    log.record("train", 1, NUMBERS)
    log.record("train", 2, NUMBERS)
    log.close()
    (line,) = lines
    assert line.startswith(f"warning: {hosted.__name__} failed") and "no way to the network" in line
    assert hosted.finished == 0 and "\n" not in line


@pytest.fixture(scope="module")
def interrupted():
    """Train, end at step 5 after a checkpoint at step 4, and train on."""

    def train(folder, changes):
        recipe = load_recipe("demo/l2r-sips", changes)

        def stop(step):
            if step == 5:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            loop.train(recipe, folder, show_progress=False, on_step=stop)
        if RunFolder(folder).tensorboard.exists():
            # Event files of one second and process are read by a counter as text: 10 before 9.
            time.sleep(1)
        assert loop.train(recipe, folder, show_progress=False).finished
        return RunFolder(folder)

    return train


def test_all_loggers_have_what_the_run_has_each_step_once(
    interrupted, tiny_changes, tmp_path, monkeypatch
):
    told = {}
    for name in HOSTED:
        module = StandIn(name)
        monkeypatch.setitem(sys.modules, name, module)
        run = interrupted(tmp_path / name, [*tiny_changes, f"training.logger={name}"])
        told[name] = (run, module.told)
        assert module.finished == 2 and not run.tensorboard.exists()
    run = interrupted(tmp_path / "tensorboard", tiny_changes)
    told["tensorboard"] = (run, in_tensorboard(run))
    names = []
    for run, points in told.values():
        expected = by_tag(run.read_metrics())
        # Exact resume: the numbers are the same whether a step was told before or after.
        same = {key: value for key, value in expected.items() if "per_second" not in key[0]}
        found = {(tag, step): value for tag, step, value in points}
        assert len(found) == len(points) and found.keys() == expected.keys()
        assert {key: found[key] for key in same} == pytest.approx(same, rel=1e-6)  # fp32 there
        names.append({tag for tag, _ in found})
    assert names[0] == names[1] == names[2] and "train/load_entropy/layer-1" in names[0]


def test_a_failing_logger_does_not_stop_a_run_nor_change_it(tiny_changes, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", StandIn("wandb", fails=("log",)))
    losses = []
    for name in ("wandb", "none"):
        changes = [*tiny_changes, "training.steps=2", f"training.logger={name}"]
        recipe = load_recipe("demo/l2r-sips", changes)
        assert loop.train(recipe, tmp_path / name, show_progress=False).finished
        losses.append([r["ce"] for r in RunFolder(tmp_path / name).read_metrics("train")])
    assert losses[0] == losses[1] and len(losses[0]) == 2


def test_a_run_resumes_with_another_logger(tiny_changes, tmp_path):
    for name in ("none", "tensorboard"):
        recipe = load_recipe("demo/l2r-sips", [*tiny_changes, f"training.logger={name}"])
        assert loop.train(recipe, tmp_path / "run", show_progress=False).finished


def test_a_missing_package_is_one_line_before_anything_is_done(
    l2r, tiny_changes, tmp_path, monkeypatch
):
    for name in HOSTED:
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ModuleNotFoundError, match=rf"pip install 'l2r-moe\[{name}\]'"):
            check_logger(name)
        changes = [*tiny_changes, f"training.logger={name}"]
        line = l2r("train", "demo/l2r-sips", *changes, "--out", tmp_path / name).refusal()
        assert f"needs the package '{name}'; pip install" in line
        assert not (tmp_path / name).exists()
    check_logger("none")
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # the default may be missing
    Log("tensorboard", RunFolder(tmp_path / "run"), 0, set(), pytest.fail).record("train", 1, {})


def test_only_the_first_rank_opens_a_logger(hosted):
    with progress_bar(show=False) as progress:
        monitor = Monitor(None, progress, "run", 3, ("tokens", 8))
        monitor.start(0, hosted.__name__)
        monitor.record("train", 1, NUMBERS)
        monitor.close()
    assert hosted.started == [] and hosted.told == []


def test_wandb_stores_it_without_a_network(folder, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb: l2r-moe[wandb]")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log = Log("wandb", folder, 0, set(), pytest.fail)
    log.record("train", 7, NUMBERS)
    log.close()
    (file,) = folder.path.glob("wandb/offline-run-*/*.wandb")
    stored = file.read_bytes()  # protocol buffers: a name, some bytes of form, its value as JSON
    for tag, value in TAGS.items():
        assert re.search(rb"train/%b.{1,6}%g" % (tag.encode(), value), stored, flags=re.S), tag


def test_trackio_stores_it_without_a_network(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when it is imported
    pytest.importorskip("trackio", reason="needs trackio: l2r-moe[trackio]")
    from trackio.sqlite_storage import SQLiteStorage

    log = Log("trackio", folder, 0, set(), pytest.fail)
    log.record("train", 7, NUMBERS)
    log.close()
    (name,) = SQLiteStorage.get_runs("l2r")
    (row,) = SQLiteStorage.get_logs("l2r", name)
    assert name.startswith("l2r_sips-") and row["step"] == 7
    assert {tag: row[f"train/{tag}"] for tag in TAGS} == TAGS
