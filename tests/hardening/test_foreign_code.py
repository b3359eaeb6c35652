"""A stranger's folder runs no code of its own, whatever command opens it.

Each hostile file would write ``ran``, a file that must not appear.
"""

import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoConfig, OlmoeConfig, OlmoeForCausalLM, ViTConfig

from l2r.files.folder import RunFolder
from l2r.hf.checkpoints import export, load_causal_lm, load_image_classifier, load_pretrained
from l2r.hf.checkpoints.pretrained import hugging_face_tokenizer, load_tokenizer, save_model
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM, L2rViTConfig
from l2r.hf.models.vit import L2rViTForImageClassification
from l2r_lab.studies.cells import folder_cells
from l2r_lab.studies.running import run_processes
from l2r_lab.studies.train_cells import run_cells
from tests.checkpoints import small_tokenizer
from tests.l2r_lab.studies.studies import SMALL

__all__ = ["small_tokenizer"]

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
}
CODE = """from pathlib import Path
Path({ran!r}).write_text("")
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

class C(OlmoeConfig):
    model_type = "stranger"

class M(OlmoeForCausalLM):
    config_class = C

class T(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def ran(tmp_path):
    """The file that hostile code would write; it must not be there at the end."""
    path = tmp_path / "ran"
    yield path
    assert not path.exists()


@pytest.fixture(scope="session")
def own_model():
    return L2rOlmoeForCausalLM(L2rOlmoeConfig(**SIZES, router={"kind": "l2r_sips"})).eval()


@pytest.fixture
def folder(tmp_path, own_model, small_tokenizer):
    """A checkpoint of ours with a tokenizer."""
    save_model(own_model, tmp_path / "model", tokenizer=small_tokenizer)
    return tmp_path / "model"


def changed(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def foreign_model(folder, ran):
    """config.json names a model type and classes that only the folder's file has."""
    (folder / "stranger.py").write_text(CODE.format(ran=str(ran)))
    names = {"AutoConfig": "stranger.C", "AutoModelForCausalLM": "stranger.M"}
    changed(folder / "config.json", model_type="stranger", auto_map=names, architectures=["M"])


def foreign_tokenizer(folder, ran):
    (folder / "stranger.py").write_text(CODE.format(ran=str(ran)))
    map_ = {"AutoTokenizer": [None, "stranger.T"]}
    changed(folder / "tokenizer_config.json", tokenizer_class="T", auto_map=map_)


LOADING = (
    ("eval", "--tasks", "piqa", "--limit", "1"),
    ("diagnose", "--instances", "1", "--length", "8"),
    ("swap", "--out", "new"),
    ("swap", "--fit", "--tokens", "64"),
    ("export", "--out", "new"),
    ("serve", "--port", "0"),
)


@pytest.mark.parametrize("command", LOADING, ids=" ".join)
@pytest.mark.parametrize("foreign", [foreign_model, foreign_tokenizer])
def test_code_of_a_checkpoint_is_refused_without_a_question(
    command, foreign, l2r, folder, ran, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    foreign(folder, ran)
    line = l2r(command[0], folder, *command[1:]).refusal()
    assert "--trust-remote-code" in line and str(folder) in line


def test_code_of_an_image_classifier_is_refused_without_a_question(l2r, ran, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    ViTConfig(architectures=["XForImageClassification"]).save_pretrained(tmp_path / "vit")
    names = {"AutoConfig": "stranger.C", "AutoModelForImageClassification": "stranger.M"}
    changed(tmp_path / "vit" / "config.json", model_type="stranger", auto_map=names)
    (tmp_path / "vit" / "stranger.py").write_text(CODE.format(ran=str(ran)))
    for command, *data in (
        ("eval", "--data", "digits"),
        ("diagnose", "--data", "digits"),
        ("landscape",),
    ):
        line = l2r(command, tmp_path / "vit", *data).refusal()
        assert "--trust-remote-code" in line, line


def test_the_library_refuses_as_the_commands_do(folder, ran, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    foreign_tokenizer(folder, ran)
    for load in (load_tokenizer, hugging_face_tokenizer, load_causal_lm):
        with pytest.raises(ValueError, match="trust_remote_code"):
            load(folder)
    foreign_model(folder, ran)
    for load in (load_pretrained, load_causal_lm):
        with pytest.raises(ValueError, match="trust_remote_code"):
            load(folder)


def test_code_runs_where_it_is_trusted(l2r, folder, tmp_path):
    marks = tmp_path / "model-ran", tmp_path / "tokenizer-ran"
    foreign_tokenizer(folder, marks[1])
    ended = l2r("swap", folder, "--out", tmp_path / "new", "--trust-remote-code")
    assert ended.code == 0 and marks[1].exists(), ended
    OlmoeForCausalLM(OlmoeConfig(**SIZES)).save_pretrained(folder, save_original_format=False)
    foreign_model(folder, marks[0])
    load_pretrained(folder, trust_remote_code=True)
    assert marks[0].exists()


def test_an_exported_folder_opens_by_the_registered_class_without_its_code(
    own_model, small_tokenizer, ran, tmp_path
):
    out = export.export_remote_code(own_model, tmp_path / "out", tokenizer=small_tokenizer)
    file = out / export.CODE / f"{export.ENTRY}.py"
    file.write_text(f"open({str(ran)!r}, 'w').close()\n" + file.read_text())
    for trust in (False, True):
        model, _ = load_causal_lm(out, trust_remote_code=trust)
        assert type(model) is L2rOlmoeForCausalLM
    assert type(AutoConfig.from_pretrained(out, trust_remote_code=False)) is L2rOlmoeConfig


def test_code_of_a_processor_is_not_looked_at(folder, ran, l2r, tmp_path):
    (folder / "stranger.py").write_text(CODE.format(ran=str(ran)))
    values = {"auto_map": {"AutoImageProcessor": "stranger.P", "AutoProcessor": "stranger.P"}}
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).write_text(json.dumps({**values, "processor_class": "P"}))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(CODE.format(ran=str(ran)))
    ended = l2r("swap", folder, "--out", tmp_path / "new")
    assert ended.code == 0, ended


class Hostile:
    """Unpickled, it writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_pickled_weights_are_refused(l2r, folder, ran, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Hostile(ran)}, folder / "pytorch_model.bin")
    line = l2r("swap", folder, "--out", tmp_path / "new").refusal()
    assert "cannot load a language model" in line


@pytest.mark.parametrize("name", ["text.npz", "patches.npz"])
def test_pickled_arrays_are_refused(name, l2r, ran, tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create()
    run.recipe.write_text("task: language\n")
    np.savez(run.path / name, layers=np.array([Hostile(ran)], dtype=object))
    assert f"from {run.path / name}" in l2r("report", run.path).refusal()


def test_pickles_among_the_shards_of_a_training_checkpoint_are_not_read(
    l2r, tiny_changes, ran, tmp_path
):
    train = ("train", "demo/l2r-sips", *tiny_changes, "training.steps=2", "evaluation.every=0")
    assert l2r(*train, "--out", tmp_path / "run").code == 0
    (tmp_path / "run" / "model" / "config.json").unlink()
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    (shard,) = checkpoint.glob("*.safetensors")
    shard.write_bytes(pickle.dumps(Hostile(ran)))
    torch.save(Hostile(ran), checkpoint / "optimizer.pt")
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Hostile(ran)))
    line = l2r(*train, "--out", tmp_path / "run").refusal()
    assert "is damaged" in line
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps({**state, "crc32": {}}))
    assert "cannot be loaded" in l2r(*train, "--out", tmp_path / "run").refusal()


TAGS = ("!!python/object/apply:os.system ['touch {ran}']", "!!python/name:os.system")


@pytest.mark.parametrize("tag", TAGS)
def test_tags_of_yaml_are_refused(tag, l2r, ran, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"task: language\nseed: {tag.format(ran=ran)}\n")
    assert "not valid YAML" in l2r("train", path, "--show").refusal()
    assert "not valid YAML" in l2r("evidence", path, "--judge-only").refusal()
    run = RunFolder(tmp_path / "run")
    run.create()
    run.recipe.write_text(path.read_text())
    assert "not valid YAML" in l2r("report", run.path, "--watch").refusal()
    assert l2r("train", "demo/l2r-sips", f"seed={tag.format(ran=ran)}", "--show").code == 2


def git(folder, *words):
    command = ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", *words]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.parametrize("inside", ["", "sub/folder"])
def test_the_git_configuration_of_a_plans_folder_runs_nothing(inside, l2r, ran, tmp_path):
    """fsmonitor, hooks, and a filter that git would run to see whether the file was changed."""
    path = tmp_path / "plans" / inside / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(yaml.safe_dump(SMALL))
    git(tmp_path / "plans", "init", "-q")
    git(tmp_path / "plans", "add", ".")
    git(tmp_path / "plans", "commit", "-qm", "plan")
    config = {"core.fsmonitor": f"touch {ran}; false", "filter.f.clean": f"touch {ran}; cat"}
    for name, value in config.items():
        git(tmp_path / "plans", "config", name, value)
    (tmp_path / "plans" / ".gitattributes").write_text("*.yaml filter=f\n")
    path.touch()
    ended = l2r("evidence", path, "--judge-only", "--results", tmp_path, "--out", tmp_path / "out")
    assert ended.code in (0, 2), ended
    assert not ran.exists()


def test_processes_of_a_study_import_nothing_from_the_folder_they_are_started_in(
    ran, tmp_path, monkeypatch
):
    """python -m puts the current folder before the packages that are installed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stranger.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    codes, _ = run_processes([sys.executable, "-m", "stranger"], 1, 1)
    assert list(codes.values()) == [1]
    cell = next(iter(folder_cells("demo", [], ["linear"], 1)))
    launch = f"{sys.executable} -c 'import stranger'"
    (outcome,) = run_cells([cell], tmp_path / "runs", launch=launch)
    assert outcome.error == "its process ended with code 1"


def test_an_image_classifier_of_a_known_type_needs_no_code(tmp_path, ran):
    config = L2rViTConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        image_size=8,
        patch_size=4,
    )
    L2rViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "stranger.py").write_text(CODE.format(ran=str(ran)))
    names = {"AutoConfig": "stranger.C", "AutoModelForImageClassification": "stranger.M"}
    changed(tmp_path / "vit" / "config.json", auto_map=names)
    loaded = load_image_classifier(tmp_path / "vit")
    assert type(loaded) is L2rViTForImageClassification
