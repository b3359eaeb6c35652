"""The first line of commands that load a checkpoint: what it will take, before the work begins."""

import pytest
from transformers.models.olmoe.modeling_olmoe import OlmoeModel

from l2r.analysis import first_line
from l2r.hf.models import weight_files

pytestmark = pytest.mark.usefixtures("coarse")

TEXT = "Question: what is the answer? Answer: yes or no. " * 12
SHORT = ["--length", "32", "--batch-size", "3"]
COMMANDS = {
    "check": ["check", "--text", TEXT, "--instances", "4", "--length", "32"],
    "diagnose": ["diagnose", "--instances", "4", *SHORT, "--certify", "0", "--out", "out"],
    "own text": ["diagnose", "--text", TEXT, "--out", "out"],
    "mismatch": ["mismatch", "--text", TEXT, "--against", "int8", "--instances", "4", *SHORT,
                 "--out", "out"],
    "recorded": ["mismatch", "--text", TEXT, "--record", "routes", "--instances", "4", *SHORT],
    "swap": ["swap", "--fit", "--tokens", "320", "--held-out", "128", "--train-steps", "2", *SHORT],
    "eval": ["eval", "--text", TEXT, "--out", "out"],
    "tasks": ["eval", "--tasks", "piqa", "--limit", "3", "--out", "out", "--batch-size", "1"],
}  # fmt: skip


@pytest.fixture
def work(monkeypatch):
    """Reads that commands announce, and tokens that models have read when they do and at the end.

    Each checkpoint takes seven minutes.
    """
    seen = {"announced": [], "before": [], "read": 0, "loaded": 0}
    forward, load = OlmoeModel.forward, weight_files.check_finite

    def counting(self, input_ids=None, **options):
        if not input_ids.is_meta:
            seen["read"] += input_ids.numel()
        return forward(self, input_ids=input_ids, **options)

    def loading(tensors):
        seen["loaded"] += 1
        return load(tensors)

    def seconds(path, reads, placement, searched, *, trust_remote_code):
        seen["announced"].append(reads)
        seen["before"].append((seen["read"], seen["loaded"]))
        return 420.0

    monkeypatch.setattr(OlmoeModel, "forward", counting)
    monkeypatch.setattr(weight_files, "check_finite", loading)
    monkeypatch.setattr(first_line, "_seconds", seconds)
    monkeypatch.setattr(first_line, "_SHORT", 0)
    return seen


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_says_once_what_it_takes_before_weights_are_loaded(
    l2r, checkpoint, text_folder, tmp_path, monkeypatch, work, name
):
    monkeypatch.chdir(tmp_path)
    command, *options = COMMANDS[name]
    if command in ("diagnose", "swap") and "--text" not in options:
        options += ["--data", str(text_folder)]
    code, out, err = l2r(command, checkpoint, *options)
    assert code == 0, err
    (line,) = (line for line in err.splitlines() if "of weights" in line)
    assert line.endswith(" tokens, about 7 minutes") and "of weights" not in out
    assert work["before"] == [(0, 0)]
    (reads,) = work["announced"]
    expected = sum(part.rows * part.length * part.times for part in reads)
    rounded = len(reads) * 8 if command == "eval" else 0  # to the mean length of 1 to 8 rows
    assert work["read"] == pytest.approx(expected, abs=rounded)
    assert work["loaded"] > 0
