"""A run told to stop saves and ends; killed at any moment it resumes to the same bits."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from l2r.runs.folder import RunFolder

STEPS = ["training.steps=60", "checkpoint.every=5", "evaluation.every=0"]


def start(folder, changes):
    command = [sys.executable, "-m", "l2r", "train", "demo/l2r-sips", *changes, *STEPS]
    return subprocess.Popen(
        [*command, "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_step(folder, step):
    for _ in range(600):
        if len(RunFolder(folder).read_metrics("train")) >= step:
            return
        time.sleep(0.1)
    raise AssertionError(f"no step {step} after a minute")


@pytest.fixture(scope="module")
def unbroken(tiny_changes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    process = start(folder / "run", tiny_changes)
    _, err = process.communicate()
    assert process.returncode == 0, err
    return load_file(folder / "run" / "model" / "model.safetensors")


def finish(folder, changes, unbroken):
    process = start(folder, changes)
    _, err = process.communicate()
    assert process.returncode == 0, err
    weights = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], unbroken[name]) for name in unbroken)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops(number, unbroken, tiny_changes, tmp_path):
    process = start(tmp_path / "run", tiny_changes)
    wait_for_step(tmp_path / "run", 3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in err, err
    assert "run it again to resume" in out
    step = int(RunFolder(tmp_path / "run").complete_checkpoints()[-1].name.removeprefix("step-"))
    assert f"stopped at step {step} of 60" in out
    finish(tmp_path / "run", tiny_changes, unbroken)


def test_kill_9_resumes_to_the_same_bits(unbroken, tiny_changes, tmp_path):
    process = start(tmp_path / "run", tiny_changes)
    wait_for_step(tmp_path / "run", 7)
    time.sleep(random.Random(0).random() * 0.2)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    finish(tmp_path / "run", tiny_changes, unbroken)
