"""A second look at a run's files, where a reader failed: theirs is the fault, or the reader's."""

import json

import pytest

from l2r.errors import InputError
from l2r.files.folder import RunFolder
from l2r.files.shapes import files_of, misshapen

ERRORS = [KeyError, TypeError, IndexError, AttributeError, OverflowError, ValueError]
HEALTHY = {
    "recipe.yaml": "task: language\nseed: 0\ntraining: {steps: 3}\n",
    "environment.json": json.dumps({"packages": {"torch": "2"}, "gpus": [], "parameters": 7}),
    "metrics.jsonl": json.dumps({"kind": "train", "step": 1, "ce": 2.5}) + "\n",
    "evaluation.json": json.dumps({"accuracy": {"piqa": 50.0}, "interval": {"piqa": [40.0, 60.0]}}),
}
# Files of another form.
OTHERS = [
    ("recipe.yaml", "training: 5"),
    ("recipe.yaml", "- 1"),
    ("environment.json", json.dumps({"packages": 5})),
    ("environment.json", json.dumps({"gpus": [3]})),
    ("environment.json", json.dumps({"router_parameters": "many"})),
    ("environment.json", "{"),
    ("metrics.jsonl", json.dumps({"kind": "validation", "step": 1, "top1": 2.5}) + "\n"),
    ("evaluation.json", json.dumps({"accuracy": [1]})),
    ("evaluation.json", json.dumps({"interval": {"piqa": 4}})),
    ("evaluation.json", json.dumps({"top1": "high"})),
    ("diagnosis.json", "{}"),
    ("patches.npz", "no archive"),
    ("text.npz", "no archive"),
]


@pytest.fixture
def run(tmp_path):
    for name, text in HEALTHY.items():
        (tmp_path / name).write_text(text)
    return RunFolder(tmp_path)


@pytest.mark.parametrize("error", ERRORS)
def test_where_all_files_are_as_they_should_be_the_fault_is_the_readers(run, error):
    with pytest.raises(error) as raised, files_of([run]):
        raise error("x")
    assert not isinstance(raised.value, InputError)


@pytest.mark.parametrize(("name", "text"), OTHERS)
def test_a_file_of_another_form_is_named_in_one_line(run, name, text):
    (run.path / name).write_text(text)
    assert [*misshapen(run)] == [run.path / name]
    for error in ERRORS:
        with pytest.raises(InputError) as refused, files_of([RunFolder("none"), run]):
            raise error("x")
        message = str(refused.value)
        assert message.startswith(f"{run.path / name} does not hold what it should: ")
        assert "\n" not in message and refused.value.__cause__ is not None


def test_what_is_refused_already_and_signals_pass(run):
    (run.path / "recipe.yaml").write_text("training: 5")
    for error in (InputError("refused"), KeyboardInterrupt(), OSError("disk")):
        with pytest.raises(type(error)) as raised, files_of([run]):
            raise error
        assert raised.value is error
