"""A run told to stop saves and ends; killed at any moment it resumes to the same bits."""

import random
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from l2r.files.folder import RunFolder
from tests.processes import command

pytestmark = pytest.mark.slow("killed processes")

STEPS = ["training.steps=200", "checkpoint.every=20", "evaluation.every=0"]


def start(folder, changes):
    train = ["train", "demo/l2r-sips", *changes, *STEPS, "--out", folder]
    return command(folder.parent / "output", *train)


def wait_for_step(folder, step):
    for _ in range(3000):
        if len(RunFolder(folder).read_metrics("train")) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"no step {step} after a minute")


@pytest.fixture(scope="module")
def unbroken(tiny_changes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    start(folder / "run", tiny_changes).succeed()
    return load_file(folder / "run" / "model" / "model.safetensors")


def finish(folder, changes, unbroken):
    start(folder, changes).succeed()
    weights = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], unbroken[name]) for name in unbroken)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops(number, unbroken, tiny_changes, tmp_path):
    process = start(tmp_path / "run", tiny_changes)
    wait_for_step(tmp_path / "run", 3)
    process.send_signal(number)
    assert process.wait() == 128 + number and "Traceback" not in process.err, process.err
    assert "run it again to resume" in process.out
    step = int(RunFolder(tmp_path / "run").complete_checkpoints()[-1].name.removeprefix("step-"))
    assert f"stopped at step {step} of 200" in process.out
    finish(tmp_path / "run", tiny_changes, unbroken)


def test_kill_9_resumes_to_the_same_bits(unbroken, tiny_changes, tmp_path):
    process = start(tmp_path / "run", tiny_changes)
    wait_for_step(tmp_path / "run", 7)
    time.sleep(random.Random(0).random() * 0.2)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    finish(tmp_path / "run", tiny_changes, unbroken)
