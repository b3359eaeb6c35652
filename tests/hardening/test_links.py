"""Nothing is written through a link, and no copy takes what a stranger's link names."""

import json
import os
from pathlib import Path

import pytest

from l2r.hf.checkpoints.pretrained import save_model
from tests.checkpoints import small_tokenizer
from tests.hardening.test_foreign_code import own_model
from tests.text.conftest import make_documents, tokenizer_file, write_shard_file

pytestmark = pytest.mark.usefixtures("coarse")

__all__ = ["own_model", "small_tokenizer", "tokenizer_file"]

TEXT = "a letter that nobody else has\n"


@pytest.fixture
def victim(tmp_path):
    """A file of the user's, and a folder with one; both must stay as they are."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter").write_text(TEXT)
    yield home
    assert list(home.iterdir()) == [home / "letter"] and (home / "letter").read_text() == TEXT


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


@pytest.fixture(scope="module")
def short(tiny_changes):
    steps = ["training.steps=2", "evaluation.every=0", "checkpoint.every=1", "checkpoint.keep=1"]
    return ("train", "demo/l2r-sips", *tiny_changes, *steps)


WRITTEN_BY_TRAINING = (
    ".writable",
    ".lock",
    "metrics.jsonl",
    "environment.json",
    ".environment.json.part",
    ".metrics.jsonl.part",
    ".recipe.yaml.part",
    "checkpoints/.step-00000001.part",
    "checkpoints/step-00000001",
    "checkpoints/.step-00000002.part",
    "checkpoints/step-00000002",
    ".model.part",
)


def test_training_replaces_links_or_refuses_them(l2r, short, victim, tmp_path):
    """Everything at once but the lock, which is refused, and is tried by itself."""
    run = tmp_path / "run"
    for name in WRITTEN_BY_TRAINING:
        folder = "step-" in name or ".model" in name
        link(run / name, victim if folder else victim / "letter")
    line = l2r(*short, "--out", run).refusal()
    assert f"{run / '.lock'} is a link" in line
    (run / ".lock").unlink()
    ended = l2r(*short, "--out", run)
    assert ended.code == 0, ended
    assert (run / "model" / "config.json").is_file()
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000002"]
    for name in ("environment.json", "metrics.jsonl"):
        assert not (run / name).is_symlink()


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "model", "model-ema", "wandb"])
def test_a_folder_of_a_run_that_is_a_link_is_refused(name, l2r, short, victim, tmp_path):
    link(tmp_path / "run" / name, victim)
    line = l2r(*short, "--out", tmp_path / "run").refusal()
    assert f"{tmp_path / 'run' / name} is a link" in line


def test_a_run_folder_may_be_a_link_of_the_users(l2r, short, tmp_path):
    (tmp_path / "disk").mkdir()
    link(tmp_path / "run", tmp_path / "disk")
    assert l2r(*short, "--out", tmp_path / "run").code == 0
    assert (tmp_path / "disk" / "model" / "config.json").is_file()


def test_a_cell_that_is_a_link_is_not_trained_in(l2r, tiny_changes, victim, tmp_path):
    link(tmp_path / "runs" / "linear", victim)
    command = ("compare", "demo", *tiny_changes, "--routers", "linear", "--out", tmp_path / "runs")
    ended = l2r(*command)
    assert ended.code == 1 and f"{tmp_path / 'runs' / 'linear'} is a link" in ended.err


@pytest.fixture
def checkpoint(tmp_path, own_model, small_tokenizer):
    save_model(own_model, tmp_path / "model", tokenizer=small_tokenizer)
    return tmp_path / "model"


EVAL = ("--tasks", "piqa", "--limit", "1")


def test_an_evaluation_replaces_links(l2r, checkpoint, victim):
    names = (
        ".evaluation.json.part",
        "evaluation.json",
        "evaluation/piqa.json",
        "evaluation/.piqa.json.part",
        "evaluation/piqa.partial.jsonl",
        "evaluation/.piqa.partial.jsonl.part",
        "evaluation/piqa.documents.jsonl",
        "evaluation/.piqa.documents.jsonl.part",
    )
    for name in names:
        link(checkpoint / name, victim / "letter")
    first = l2r("eval", checkpoint, "--out", checkpoint, *EVAL)
    assert first.code in (0, 2), first
    for name in ("evaluation/piqa.json", "evaluation/piqa.documents.jsonl"):
        (checkpoint / name).unlink(missing_ok=True)
    ended = l2r("eval", checkpoint, "--out", checkpoint, *EVAL)
    assert ended.code == 0, ended
    assert json.loads((checkpoint / "evaluation.json").read_text())["tasks"]["piqa"]
    assert not (checkpoint / "evaluation.json").is_symlink()


def test_an_evaluation_folder_that_is_a_link_is_refused(l2r, checkpoint, victim):
    link(checkpoint / "evaluation", victim)
    line = l2r("eval", checkpoint, "--out", checkpoint, *EVAL).refusal()
    assert f"{checkpoint / 'evaluation'} is a link" in line


def test_a_card_is_not_written_through_the_folder_of_the_model(own_model, victim, tmp_path):
    from l2r.files.folder import RunFolder
    from l2r.hf.checkpoints.run_card import update_card

    save_model(own_model, tmp_path / "other")
    before = (tmp_path / "other" / "README.md").read_bytes()
    run = RunFolder(tmp_path / "run")
    run.create()
    run.recipe.write_text("task: language\nseed: 5\n")
    link(run.model, tmp_path / "other")
    update_card(run, own_model)
    assert (tmp_path / "other" / "README.md").read_bytes() == before


def test_a_diagnosis_replaces_links_and_refuses_linked_folders(
    l2r, checkpoint, text_folder, victim, tmp_path
):
    out = tmp_path / "diagnosis"
    names = ("diagnosis.json", "diagnosis.safetensors", "text.npz")
    for name in (*names, *(f".{name}.part" for name in names)):
        link(out / "model" / name, victim / "letter")
    for name in ("index.html", ".index.html.part", "index-text.html", ".index-text.html.part"):
        link(out / name, victim / "letter")
    command = ("diagnose", checkpoint, "--data", text_folder, "--instances", 2, "--length", 16)
    command += ("--sample", 16, "--certify", 0, "--gain", 0, "--text-tokens", 32)
    ended = l2r(*command, "--out", out)
    assert ended.code == 0, ended
    for name in names:
        assert (out / "model" / name).is_file() and not (out / "model" / name).is_symlink()
    link(tmp_path / "second" / "model", victim)
    line = l2r(*command, "--out", tmp_path / "second").refusal()
    assert f"{tmp_path / 'second' / 'model'} is a link" in line


@pytest.mark.parametrize(
    "command",
    [
        ("landscape", "--out", "page"),
        ("data", "plan", "--tokens", "200B", "--out", "page"),
    ],
    ids=" ".join,
)
def test_a_link_given_as_out_is_replaced_by_the_file(command, l2r, victim, tmp_path):
    """A user's own link is a name for the file, not a place to write to."""
    for name in ("page", ".page.part"):
        link(tmp_path / name, victim / "letter")
    *words, _ = command
    ended = l2r(*words, tmp_path / "page")
    assert ended.code == 0, ended
    assert not (tmp_path / "page").is_symlink() and (tmp_path / "page").stat().st_size > len(TEXT)


@pytest.mark.parametrize("target", ["home", "nowhere", "empty"])
def test_a_new_folder_does_not_take_the_place_of_a_link(target, l2r, checkpoint, victim, tmp_path):
    (tmp_path / "empty").mkdir()
    link(tmp_path / "new", tmp_path / target)
    line = l2r("swap", checkpoint, "--out", tmp_path / "new").refusal()
    assert "out must be a new or empty folder" in line and not list((tmp_path / "empty").iterdir())


@pytest.mark.parametrize("command", ["swap", "export"])
@pytest.mark.parametrize("name", ["LICENSE", "vocab.txt", "additional_chat_templates/rag.jinja"])
def test_a_link_in_a_folder_does_not_bring_another_file_into_a_copy(
    command, name, l2r, checkpoint, victim, tmp_path
):
    """A copy may be published, with what a stranger's link named."""
    link(checkpoint / name, victim / "letter")
    line = l2r(command, checkpoint, "--out", tmp_path / "new").refusal()
    assert f"{checkpoint / name} is a link to {victim / 'letter'}" in line
    assert not (tmp_path / "new").exists()


def test_links_of_a_hub_cache_and_of_the_folder_itself_are_followed(
    l2r, checkpoint, small_tokenizer, tmp_path
):
    """A snapshot of the hub's cache is a folder of links into blobs."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b/snapshots/0f"
    blobs.mkdir(parents=True)
    (checkpoint / "LICENSE.txt").write_text("free\n")
    for number, file in enumerate(sorted(checkpoint.iterdir())):
        file.rename(blobs / str(number))
        link(snapshot / file.name, Path("../../blobs") / str(number))
    link(snapshot / "LICENSE", Path("LICENSE.txt"))
    ended = l2r("swap", snapshot, "--out", tmp_path / "new")
    assert ended.code == 0, ended
    assert (tmp_path / "new" / "LICENSE").read_text() == "free\n"
    assert not any(path.is_symlink() for path in (tmp_path / "new").iterdir())


def test_prepare_replaces_links_and_refuses_linked_folders(l2r, tokenizer_file, victim, tmp_path):
    shard = "data/wiki/wiki-0000.jsonl"
    write_shard_file(tmp_path / "shards" / shard, make_documents(0, 60))
    command = ("data", "prepare", "--out", tmp_path / "tokens", "--data", tmp_path / "shards")
    command += ("--tokenizer", tokenizer_file, "--processes", 1, "--hold-out", 0.1)
    names = ("manifest.json", ".manifest.json.part", "wiki-00000.bin", "wiki-00000.ends")
    for part in ("train", "validation"):
        for name in names:
            link(tmp_path / "tokens" / part / name, victim / "letter")
    for name in ("tokenizer.json", "tokenizer_config.json", ".tokenizer.json.part"):
        link(tmp_path / "tokens" / "tokenizer" / name, victim / "letter")
    ended = l2r(*command)
    assert ended.code == 0, ended
    assert not any(p.is_symlink() for p in (tmp_path / "tokens" / "train").iterdir())
    for name in ("train", "train/receipts", "tokenizer", "validation"):
        out = tmp_path / f"linked {name}".replace("/", " ")
        link(out / name, victim)
        assert f"{out / name} is a link" in l2r(*command[:2], "--out", out, *command[4:]).refusal()


def test_claims_of_a_study_are_not_emptied(victim, tmp_path):
    from l2r_lab.studies.running import Job, walk

    link(tmp_path / ".claims" / "cell", victim / "letter")
    with pytest.raises(ValueError, match="is a link"):
        list(walk([Job("cell", pytest.fail)], tmp_path / ".claims", share="a"))


def test_a_fifo_in_the_place_of_a_file_stops_nothing(tmp_path):
    """Opening one waits for somebody to read it, for ever."""
    from l2r.files.folder import RunFolder

    run = RunFolder(tmp_path)
    for name in ("metrics.jsonl", ".lock"):
        os.mkfifo(tmp_path / name)
        os.open(tmp_path / name, os.O_RDONLY | os.O_NONBLOCK)  # so that the test itself ends
    with pytest.raises(ValueError, match="is no regular file"), run.lock():
        pass
    with pytest.raises(ValueError, match="is no regular file"):
        run.append_metrics({"kind": "train", "step": 1})
