"""The commands swap, with a fit and without, and export on a tiny checkpoint."""

import json
import re
import resource
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from l2r.hf.checkpoints import load_pretrained
from l2r.hf.swap import swap_routers
from l2r.hf.swap.families import FAMILIES
from l2r.routers import L2RConfig, L2RRouter
from tests.hf.families import sample_tokens, tiny_model
from tests.processes import script

WORDS = ["cat", "dog", "bird", "fish", "one", "two", "three", "four"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny OLMoE with a word tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "olmoe"
    tiny_model(FAMILIES["olmoe"]).save_pretrained(folder)
    vocabulary = {word: i for i, word in enumerate(["<unk>", "<bos>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")
    fast.save_pretrained(folder)
    return folder


def test_swap_writes_a_checkpoint_with_our_router(l2r, checkpoint, tmp_path):
    out = tmp_path / "out"
    code, text, _ = l2r("swap", checkpoint, "router.kind=l2r_sips", "router.rank=2", "heads=4",
        "beta=0.5", "--layers", "1", "--out", out, "--json",
    )  # fmt: skip
    assert code == 0
    rows = json.loads(text)
    assert [row["router"] for row in rows] == ["kept", "l2r_sips"]
    model = load_pretrained(out)
    router = model.model.layers[1].mlp.gate
    assert isinstance(router, L2RRouter)
    assert (router.config.rank, router.config.heads, router.config.beta) == (2, 4, 0.5)
    assert (out / "tokenizer.json").is_file()
    card = (out / "README.md").read_text()
    assert f"put untrained routers into {checkpoint.name};" in card and str(tmp_path) not in card


@pytest.mark.parametrize(
    "command",
    [
        ("swap", "rank=2"),
        ("swap", "rank=2", "--fit", "--updates", "0", "--train-steps", "1"),
        ("swap", "rank=2", "--fit", "--updates", "0"),
        ("export",),
    ],
    ids=["swap by file", "swap --train-steps", "swap --fit", "export"],
)
def test_what_prepares_a_checkpoints_inputs_is_kept(
    l2r, checkpoint, text_folder, tmp_path, command
):
    old, new, (name, *options) = tmp_path / "old", tmp_path / "new", command
    shutil.copytree(checkpoint, old)
    if name == "export":
        swap_routers(load_pretrained(old), L2RConfig(rank=2)).save_pretrained(old)
    if "--fit" in options:
        options += ["--data", text_folder, "--tokens", 64, "--held-out", 64, "--length", 8]
    text = json.dumps({"image_processor_type": "ViTImageProcessor", "image_mean": [0.5, 0.4, 0.3]})
    files = (
        *(f"{name}_config.json" for name in ("preprocessor", "processor", "video_preprocessor")),
        *("old.tiktoken", "sentencepiece.bpe.model", "merges.txt", "special_tokens_map.json"),
        "LICENSE",
    )
    for file in files:
        (old / file).write_text(text)
    for file in ("consolidated.00.pth", "modeling_mine.py", "trainer_state.json", ".gitattributes"):
        (old / file).write_text("{}")
    (old / "assets").mkdir()
    ended = l2r(name, old, *options, "--out", new)
    assert ended.code == 0
    assert {(new / file).read_text() for file in files} == {text}
    left_out = "assets/, consolidated.00.pth, modeling_mine.py, trainer_state.json"
    assert f"not copied from {old}: {left_out}" in ended.err.splitlines()
    assert not any(path.name in left_out for path in new.iterdir())


def test_a_tokenizer_of_vocabulary_and_merges_is_kept(l2r, checkpoint, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(checkpoint, old)
    for file in old.glob("*token*.json"):
        file.unlink()
    vocabulary = {letter: n for n, letter in enumerate(sorted(ByteLevel.alphabet()))}
    (old / "vocab.json").write_text(json.dumps(vocabulary | {"<|endoftext|>": 256, "he": 257}))
    (old / "merges.txt").write_text("#version: 0.2\nh e\n")
    assert l2r("swap", old, "rank=2", "--out", new).code == 0
    before, after = (AutoTokenizer.from_pretrained(path)("hello").input_ids for path in (old, new))
    assert before == after and 257 in before


@pytest.mark.parametrize("command", ["swap", "swap --fit", "export"])
def test_a_device_map_is_checked_where_files_are_only_copied(l2r, checkpoint, tmp_path, command):
    more = ("--device-map", '{"": "gpu"}', "--out", tmp_path / "new")
    line = l2r(*command.split(), checkpoint, *more).refusal()
    assert "device must be" in line and "'gpu'" in line


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--out", "{tmp}/new", "router.kind=l2r_sipps"], "did you mean 'l2r_sips'?"),
        (["--out", "{tmp}/new", "router.knd=linear"], "has no option 'knd' (did you mean 'kind'?)"),
        (["--out", "{tmp}/new", "rank"], "changes must look like key.sub=value; got 'rank'"),
        (["--out", "{tmp}/new", "kind="], "kind is missing from the router configuration"),
        (["--out", "{tmp}/new", "heads=9999999999999999"], "error: a size is too large: "),
        (["--out", "{tmp}/new", "heads=99999999999999999999"], "error: a size is too large: "),
        (["--out", "{tmp}/new", "--layers", "a,b"], "layers must be 'all' or indices"),
        (["--out", "{tmp}/new", "--layers", "9"], "layers must name layers"),
        (["--out", "{tmp}/new", "--selection", "mine"], "'mine' is not one of 'family', 'router'"),
        (["--out", "{tmp}"], "out must be a new or empty folder"),
    ],
)
def test_swap_refuses_bad_input_in_one_line(l2r, checkpoint, tmp_path, options, line):
    (tmp_path / "used.txt").write_text("x")
    filled = [option.format(tmp=tmp_path) for option in options]
    assert line in l2r("swap", checkpoint, *filled).refusal()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["used.txt"]


@pytest.mark.parametrize("ignored", [False, True])
def test_swap_told_to_end_leaves_nothing_unless_the_signal_is_ignored(
    checkpoint, tmp_path, ignored
):
    """SIGTERM comes when the weights are written and the folder has not its name yet."""
    out = tmp_path / "models" / "out"
    code = f"""
import os, signal
from l2r.cli import main
from l2r.hf.checkpoints import pretrained

def write_card(folder, *more):
    assert (folder / "model.safetensors").is_file()
    os.kill(os.getpid(), signal.SIGTERM)

pretrained.write_card = write_card
if {ignored}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
main(["swap", {str(checkpoint)!r}, "rank=2", "--out", {str(out)!r}])
"""
    process = script(tmp_path / "output", code)
    assert process.wait() == (0 if ignored else 143), process.err
    assert "Traceback" not in process.err
    assert list(out.parent.iterdir()) == ([out] if ignored else [])


@pytest.mark.parametrize("command", ["swap", "swap --fit", "export", "data tokenizer"])
def test_a_full_disk_is_one_line_that_names_the_folder(
    l2r, checkpoint, text_folder, tmp_path, command
):
    """safetensors and tokenizers have errors of their own for it."""
    out = tmp_path / "out"
    arguments = {
        "swap": [checkpoint],
        "swap --fit": [
            checkpoint,
            "--data",
            text_folder,
            "--tokens",
            600,
            "--held-out",
            300,
            "--length",
            32,
        ],
        "export": [checkpoint],
        "data tokenizer": ["--data", text_folder, "--vocab-size", 300],
    }[command]
    if command == "export":
        assert l2r("swap", checkpoint, "--out", tmp_path / "swapped").code == 0
        arguments = [tmp_path / "swapped"]
    before, limits = set(tmp_path.iterdir()), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))  # like a disk that is full
        line = l2r(*command.split(), *arguments, "--out", out).refusal()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(out) in line and line.endswith(": file too large")
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and out in path.parents]
    assert set(tmp_path.iterdir()) - before <= {out}


def test_a_command_puts_the_handler_of_sigterm_back(l2r, checkpoint, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    assert l2r("swap", checkpoint, "rank=2", "--out", tmp_path / "out")[0] == 0
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("selection", ["family", "router"])
def test_swap_without_options_takes_the_setting_that_the_evidence_prefers(
    l2r, checkpoint, tmp_path, selection
):
    """Where the family selects, it decides about normalized weights too."""
    code, _, _ = l2r("swap", checkpoint, "--selection", selection, "--out", tmp_path / "out")
    assert code == 0
    sizes = {"num_experts": 8, "hidden_size": 32, "top_k": 2}
    router = load_pretrained(tmp_path / "out").model.layers[0].mlp.gate
    assert {name: getattr(router, name) for name in sizes} == sizes
    expected = L2RConfig.for_experts(**sizes)
    assert router.config == replace(expected, normalize_weights=selection == "router")


def test_swap_takes_the_preset_with_other_options(l2r, checkpoint, tmp_path):
    out = tmp_path / "out"
    assert l2r("swap", checkpoint, "preset=evidence", "rank=2", "--out", out)[0] == 0
    config = load_pretrained(out).model.layers[0].mlp.gate.config
    assert (config.rank, config.heads, config.gamma) == (2, 4, 4.0)
    line = l2r("swap", checkpoint, "preset=best", "--out", tmp_path / "new").refusal()
    assert "preset must be evidence; got preset='best'" in line


def test_swap_needs_a_folder_to_write(l2r, checkpoint):
    code, _, err = l2r("swap", checkpoint)
    assert code == 2 and "--out must name a new folder" in err


def test_a_missing_checkpoint_is_refused(l2r, tmp_path):
    assert (
        "checkpoint must be a folder"
        in l2r("swap", tmp_path / "none", "--out", tmp_path / "out").refusal()
    )


def test_a_fit_measures_and_saves(l2r, checkpoint, text_folder, tmp_path):
    out = tmp_path / "out"
    code, text, err = l2r("swap", checkpoint, "rank=4", "heads=4", "--fit", "--data", text_folder,
        "--tokens", 3000, "--held-out", 600, "--length", 32, "--train-steps", 2,
        "--out", out, "--json",
    )  # fmt: skip
    assert code == 0
    result = json.loads(text)
    assert list(result["perplexity"]) == ["original", "swapped", "fitted", "trained"]
    for layer in result["layers"]:
        assert layer["agreement"] > layer["agreement_before"]
        assert layer["divergence"] < layer["divergence_before"]
    assert load_pretrained(out)(sample_tokens()).logits.isfinite().all()
    assert "--tokens 3000 --updates 4 --train-steps 2" in (out / "README.md").read_text()
    fitted, measured = (line for line in err.splitlines() if line.startswith("read "))
    assert re.fullmatch(r"read [\d,]+ tokens of (\d+) of \1 files to fit on", fitted), fitted
    assert measured.endswith("files to measure on")


def test_a_fit_reads_a_single_file_and_writes_nothing_without_a_folder(
    l2r, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"{'cat dog bird ' * 20} {WORDS[n % 8]}"}) for n in range(40)]
    (tmp_path / "one.jsonl").write_text("\n".join(lines))
    words = ("swap", checkpoint, "rank=2", "heads=4", "--fit", "--data", "one.jsonl")
    ended = l2r(*words, "--tokens", "2K", "--held-out", 300, "--length", 32, "--json")
    assert ended.code == 0, ended
    assert list(json.loads(ended.out)["perplexity"]) == ["original", "swapped", "fitted"]
    assert "tokens of 1 of 1 files to fit on" in ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["one.jsonl"]


@pytest.mark.slow("fits twice")
def test_a_fit_with_layers_on_disk_writes_what_it_writes_in_memory(
    l2r, checkpoint, text_folder, tmp_path
):
    """The way of a checkpoint that is larger than memory."""
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "disk"}
    places |= {"model.layers.0": "disk", "model.layers.1": "disk", "lm_head": "cpu"}
    fit = ("--fit", "--data", text_folder)
    weights = []
    for name, options in (("memory", ()), ("disk", ("--device-map", json.dumps(places)))):
        out = tmp_path / name
        ended = l2r("swap", checkpoint, "rank=2", "heads=2", *fit, *options, "--out", out)
        assert ended.code == 0, ended
        weights.append(load_pretrained(out).state_dict())
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_fit_needs_text_and_a_tokenizer(l2r, checkpoint, tmp_path):
    assert (
        "--data must be a file or a folder that exists"
        in l2r("swap", checkpoint, "--fit", "--data", tmp_path / "none").refusal()
    )
    tiny_model(FAMILIES["olmoe"]).save_pretrained(tmp_path / "bare")
    assert "the checkpoint has no tokenizer" in l2r("swap", tmp_path / "bare", "--fit").refusal()
    assert "lr must be > 0" in l2r("swap", checkpoint, "--fit", "--lr", 0).refusal()


def test_export_of_a_swapped_olmoe(l2r, checkpoint, tmp_path):
    assert l2r("swap", checkpoint, "--out", tmp_path / "swapped")[0] == 0
    code, text, _ = l2r("export", tmp_path / "swapped", "--out", tmp_path / "alone")
    assert code == 0
    assert "trust_remote_code=True" in text
    assert (tmp_path / "alone" / "l2r_code" / "modeling_l2r.py").is_file()
    ids = sample_tokens()
    with torch.no_grad():
        swapped = load_pretrained(tmp_path / "swapped")(ids).logits
        torch.testing.assert_close(load_pretrained(tmp_path / "alone")(ids).logits, swapped)


def test_export_refuses_other_models(l2r, checkpoint, tmp_path):
    assert (
        "with routers of ours; got OlmoeForCausalLM with 0 of them"
        in l2r("export", checkpoint, "--out", tmp_path / "alone").refusal()
    )
    assert not (tmp_path / "alone").exists()


def test_a_bf16_checkpoint_stays_bf16_with_fp32_routers(l2r, checkpoint, text_folder, tmp_path):
    narrow = tmp_path / "bf16"
    shutil.copytree(checkpoint, narrow)
    load_pretrained(checkpoint).bfloat16().save_pretrained(narrow)
    code, _, err = l2r("swap", narrow, "rank=2", "heads=4", "--out", tmp_path / "one")
    assert code == 0, err
    code, text, err = l2r("swap", narrow, "rank=2", "heads=4", "--fit", "--data", text_folder,
        "--tokens", 600, "--held-out", 300, "--length", 32, "--train-steps", 1,
        "--out", tmp_path / "two", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert "trained" in json.loads(text)["perplexity"]
    for out in ("one", "two"):
        for name, value in load_file(tmp_path / out / "model.safetensors").items():
            assert value.dtype == (torch.float32 if ".gate." in name else torch.bfloat16), name
        model = load_pretrained(tmp_path / out, dtype="auto")
        with torch.no_grad():
            assert model(sample_tokens()).logits.isfinite().all()


@pytest.mark.slow("a chain of commands")
def test_a_bf16_checkpoint_is_exported_evaluated_and_diagnosed(
    l2r, checkpoint, text_folder, tmp_path
):
    model = swap_routers(load_pretrained(checkpoint).bfloat16(), L2RConfig(rank=2, heads=4))
    shutil.copytree(checkpoint, tmp_path / "bf16")
    model.save_pretrained(tmp_path / "bf16")
    code, _, err = l2r("export", tmp_path / "bf16", "--out", tmp_path / "alone")
    assert code == 0, err
    for name, value in load_file(tmp_path / "alone" / "model.safetensors").items():
        assert value.dtype == (torch.float32 if ".gate." in name else torch.bfloat16), name
    assert json.loads((tmp_path / "alone" / "config.json").read_text())["dtype"] == "bfloat16"
    scored = ("--tasks", "piqa", "--limit", 2, "--dtype", "bfloat16", "--json")
    code, text, err = l2r("eval", tmp_path / "bf16", *scored, "--out", tmp_path / "scores")
    assert code == 0 and 0 <= json.loads(text)[0]["PIQA"] <= 100, err
    sizes = ("--instances", 2, "--length", 16, "--certify", 0, "--sample", 16)
    data = ("--data", text_folder, "--out", tmp_path / "diagnosis")
    code, text, err = l2r("diagnose", tmp_path / "bf16", *data, *sizes, "--json")
    assert code == 0, err
    assert all(0 <= row["stability"] <= 1 for row in json.loads(text))
