"""Damaged and absurd input: only ValueError or OSError, in one line, whatever comes in.

Each test draws L2R_FUZZ cases (25 by default); ``make fuzz`` draws 10,000 in all.
"""

import json
import os
import shutil
import string
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from l2r import RouterConfig, build_router
from l2r.cli import main
from l2r.files.folder import RunFolder, find_runs
from l2r.hf.checkpoints import load_causal_lm
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.routers import make_config, router_names
from l2r.text.tokens import TokenDataset, read_documents
from l2r_lab.report.comparison import comparison_table
from l2r_lab.training.recipes.load import load_recipe, recipe_names

CASES = int(os.environ.get("L2R_FUZZ", "25"))
fuzz = settings(
    max_examples=CASES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.integers(-3, 12),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["sips", "dot", "rmsnorm", "batchnorm", "float32", "bfloat16", "nan"]),
)
VALUES = st.one_of(SCALARS, st.lists(SCALARS, max_size=3), st.dictionaries(st.text(), SCALARS))
FIELDS = st.sampled_from(
    ["rank", "heads", "gamma", "beta", "p", "temperature", "learn_temperature", "dtype", "eps"]
    + ["query_norm", "scoring", "normalize_weights", "init_std", "gate", "bias", "kind", "rnk"]
)


def clean(call, *args):
    """Run ``call``; a refusal must be a ValueError or OSError with a short, one-line message."""
    try:
        return call(*args)
    except (ValueError, OSError) as error:
        assert str(error).strip(), "an empty message"
        assert not isinstance(error, UnicodeError), f"not worded for a person: {error}"
        return None


@fuzz
@given(kind=st.sampled_from(router_names()), options=st.dictionaries(FIELDS, VALUES, max_size=4))
def test_router_options(kind, options):
    config = clean(lambda: make_config(kind, **{k: v for k, v in options.items() if k != "kind"}))
    if config is not None:
        sizes = {"hidden_size": 8, "num_experts": 4, "top_k": 2}
        router = clean(lambda: build_router(config, **sizes) if small(config) else None)
        if router is not None:
            assert RouterConfig.from_dict(config.to_dict()).kind == kind


def small(config):
    """Whether the router can be built without filling the memory."""
    return all((getattr(config, name, 1) or 1) <= 64 for name in ("rank", "heads"))


@fuzz
@given(values=st.dictionaries(FIELDS, VALUES, max_size=4))
def test_router_dictionaries(values):
    clean(RouterConfig.from_dict, values)


KEYS = st.sampled_from(
    ["training.steps", "training.tokens", "router.rank", "router", "router.kind", "model", "seed"]
    + ["data.corpus", "optimizer.betas", "optimizer.lr", "losses.balance_variant", "base", "task"]
    + ["evaluation.tasks", "a.b.c.d", "", ".", "training..steps", "model.num_experts"]
)
TEXTS = st.one_of(SCALARS.map(str), st.text(alphabet=string.printable, max_size=20))


@fuzz
@given(name=st.sampled_from(recipe_names()), changes=st.lists(st.tuples(KEYS, TEXTS), max_size=3))
def test_recipe_changes(name, changes):
    clean(load_recipe, name, [f"{key}={value}" for key, value in changes])


@fuzz
@given(cut=st.integers(0, 900), noise=st.text(max_size=30), at=st.integers(0, 900))
def test_recipe_files(cut, noise, at, tmp_path_factory):
    base = Path(__file__).parents[2] / "src/l2r_lab/training/recipes/demo/_base.yaml"
    source = base.read_text()
    source = source.partition("\n---\n")[0]  # the settings, without the table of recipes
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    path.write_text(source[:at] + noise + source[at : max(at, len(source) - cut)])
    clean(load_recipe, str(path))


WORDS = st.sampled_from(
    ["params", "report", "train", "eval", "data", "plan", "swap", "landscape", "--json", "--ranks"]
    + ["--heads", "2,4", "0", "-1", "x", "demo/l2r-sips", "--show", "--list", "--tokens", "10B"]
    + ["--hidden-size", "--layers", "training.steps=3", "nowhere", "--help", "9" * 30, "\u0000"]
)


@pytest.mark.slow("many cases")
@fuzz
@given(words=st.lists(WORDS, max_size=5))
def test_command_lines(words, capsys, monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "empty"
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    if "train" in words and "--show" not in words and "--list" not in words:
        words = [*words, "--show"]  # everything but the training itself
    with pytest.raises(SystemExit) as done:
        main(words)
    captured = capsys.readouterr()
    assert done.value.code in (0, 2), (words, captured.err)
    assert "Traceback" not in captured.err


@pytest.fixture(scope="module")
def token_folder(text_folder, tmp_path_factory):
    from l2r.text.corpus import CorpusOptions, build_corpus

    options = CorpusOptions(folder=str(text_folder), vocab_size=300, characters_per_domain=10_000)
    return build_corpus(options, cache=tmp_path_factory.mktemp("cache")).train


def damage(path: Path, how, position, byte):
    """Truncate, flip a bit, insert or empty a file."""
    content = bytearray(path.read_bytes())
    place = position % max(1, len(content))
    if how == "truncate":
        content = content[:place]
    elif how == "flip" and content:
        content[place] ^= 1 << (byte % 8)
    elif how == "insert":
        content[place:place] = bytes([byte])
    path.write_bytes(bytes(content) if how != "empty" else b"")


DAMAGE = {
    "how": st.sampled_from(["truncate", "flip", "insert", "empty"]),
    "position": st.integers(0, 1 << 20),
    "byte": st.integers(0, 255),
}


@fuzz
@given(file=st.integers(0, 9), **DAMAGE)
def test_token_files_and_manifests(file, how, position, byte, token_folder, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "tokens"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(token_folder, folder)
    files = sorted(folder.iterdir())
    damage(files[file % len(files)], how, position, byte)
    dataset = clean(lambda: TokenDataset(folder, 16, verify=True))
    if dataset is not None:
        assert int(dataset.rows([0])["input_ids"].max()) < dataset.tokenizer.vocab_size
        clean(lambda: list(read_documents(folder)))


@fuzz
@given(name=st.text(max_size=12), size=st.integers(-5, 2**40), value=VALUES)
def test_manifest_fields(name, size, value, token_folder, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "manifest"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(token_folder, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    entry = manifest["files"][0]
    entry["name"], entry["tokens"] = f"../{name}", size
    manifest["tokenizer"]["vocab_size"] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="manifest"):
        TokenDataset(folder, 16)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 40}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 2}
    config = L2rOlmoeConfig(**sizes, **experts, router={"kind": "l2r_sips", "heads": 2})
    L2rOlmoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow("many cases")
@fuzz
@given(file=st.integers(0, 2), **DAMAGE)
def test_model_checkpoints(file, how, position, byte, model_folder, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model_folder, folder)
    files = [folder / "config.json", folder / "model.safetensors"]
    # the header of a safetensors file is where damage can be seen; its numbers have no checksum
    limit = 400 if files[file % 2].suffix == ".safetensors" else 1 << 20
    damage(files[file % 2], how, position % limit, byte)
    clean(load_causal_lm, folder)


@fuzz
@given(file=st.sampled_from(["metrics.jsonl", "recipe.yaml", "environment.json"]), **DAMAGE)
def test_run_folders(file, how, position, byte, tmp_path_factory):
    root = tmp_path_factory.getbasetemp() / "run"
    shutil.rmtree(root, ignore_errors=True)
    run = RunFolder(root)
    run.create()
    run.recipe.write_text("task: language\n")
    run.write_json(run.environment, {"router_parameters": 5, "parameters": 9})
    run.append_metrics({"kind": "train", "step": 1, "tokens": 8, "ce": 2.0, "balance": 1.0})
    run.append_metrics({"kind": "validation", "step": 1, "tokens": 8, "ce/mean": 2.0})
    damage(root / file, how, position, byte)
    clean(lambda: comparison_table(find_runs(root)))


@fuzz
@given(
    kind=st.sampled_from(router_names()),
    value=st.sampled_from([0.0, 1e30, -1e30, 1e-45, 6e4, 3e38, float("inf"), float("nan")]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_extreme_inputs_route_every_token_to_experts_that_exist(kind, value, dtype):
    router = build_router(kind, hidden_size=8, num_experts=4, top_k=2).eval()
    x = torch.randn(5, 8).to(dtype)
    x[2] = torch.tensor(value).to(dtype)
    logits, weights, indices = router(x)
    assert indices.min() >= 0 and indices.max() < 4 and weights.shape == (5, 2)
    others = torch.tensor([0, 1, 3, 4])
    assert torch.isfinite(logits[others]).all() and torch.isfinite(weights[others]).all()
