"""The commands swap, upcycle and export on a tiny checkpoint, good and bad input."""

import json
import shutil

import jaxtyping
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from l2r.cli import main
from l2r.models import load_pretrained
from l2r.models.families import FAMILIES
from l2r.models.family_check import sample_tokens, tiny_model
from l2r.routers import L2RRouter

WORDS = ["cat", "dog", "bird", "fish", "one", "two", "three", "four"]


@pytest.fixture(autouse=True, scope="module")
def _quiet():
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


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


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return stop.value.code or 0, captured.out, captured.err


def refused(capsys, *arguments):
    """The one line on standard error of a command that must exit with 2."""
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert "Traceback" not in out + err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_swap_writes_a_checkpoint_with_our_router(capsys, checkpoint, tmp_path):
    out = tmp_path / "out"
    code, text, _ = run(
        capsys, "swap", checkpoint, "--router", "l2r_sips", "--rank", 2, "--heads", 4,
        "--option", "beta=0.5", "--layers", "1", "--out", out, "--json",
    )  # fmt: skip
    assert code == 0
    rows = json.loads(text)
    assert [row["router"] for row in rows] == ["kept", "l2r_sips"]
    model = load_pretrained(out)
    router = model.model.layers[1].mlp.gate
    assert isinstance(router, L2RRouter)
    assert (router.config.rank, router.config.heads, router.config.beta) == (2, 4, 0.5)
    assert (out / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ([], "swap needs CHECKPOINT and --out FOLDER"),
        (["--out", "{tmp}/new", "--router", "l2r_sipps"], "did you mean 'l2r_sips'?"),
        (["--out", "{tmp}/new", "--option", "rank"], "option must be written as name=value"),
        (["--out", "{tmp}/new", "--layers", "a,b"], "layers must be 'all' or indices"),
        (["--out", "{tmp}/new", "--layers", "9"], "layers must name layers"),
        (["--out", "{tmp}/new", "--selection", "mine"], "selection must be family or router"),
        (["--out", "{tmp}"], "out must be a new or empty folder"),
    ],
)
def test_swap_refuses_bad_input_in_one_line(capsys, checkpoint, tmp_path, options, line):
    (tmp_path / "used.txt").write_text("x")
    filled = [option.format(tmp=tmp_path) for option in options]
    assert line in refused(capsys, "swap", checkpoint, *filled)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["used.txt"]


def test_a_missing_checkpoint_is_refused(capsys, tmp_path):
    assert "checkpoint must be a folder" in refused(
        capsys, "swap", tmp_path / "none", "--out", tmp_path / "out"
    )


def test_the_table_of_families_is_printed_and_written(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # checks are not traceable
    page = tmp_path / "families.md"
    code, text, _ = run(
        capsys, "swap", "--families", "--only", "gpt_oss", "--json", "--write", page
    )
    assert code == 0
    (row,) = json.loads(text)
    assert row.pop("family") == "gpt_oss"
    assert set(row.values()) == {"yes"}, row
    assert "| gpt_oss | yes |" in page.read_text()
    assert "`llama4`: it multiplies" in page.read_text()


def test_an_unknown_family_is_refused(capsys):
    assert "family must be one of olmoe" in refused(capsys, "swap", "--families", "--only", "gpt2")


def test_upcycle_fits_and_saves(capsys, checkpoint, text_folder, tmp_path):
    out = tmp_path / "out"
    code, text, _ = run(
        capsys, "upcycle", checkpoint, "--rank", 4, "--heads", 4, "--text", text_folder,
        "--tokens", 3000, "--held-out", 600, "--sequence-length", 32, "--train-steps", 2,
        "--out", out, "--json",
    )  # fmt: skip
    assert code == 0
    result = json.loads(text)
    assert list(result["perplexity"]) == ["original", "swapped", "fitted", "trained"]
    for layer in result["layers"]:
        assert layer["agreement"] > layer["agreement_before"]
        assert layer["divergence"] < layer["divergence_before"]
    assert load_pretrained(out)(sample_tokens()).logits.isfinite().all()


def test_upcycle_needs_text_and_a_tokenizer(capsys, checkpoint, tmp_path):
    assert "corpus folder must exist" in refused(
        capsys, "upcycle", checkpoint, "--text", tmp_path / "none"
    )
    tiny_model(FAMILIES["olmoe"]).save_pretrained(tmp_path / "bare")
    assert "checkpoint must hold a tokenizer" in refused(capsys, "upcycle", tmp_path / "bare")
    assert "lr must be > 0" in refused(capsys, "upcycle", checkpoint, "--lr", 0)


def test_export_of_a_swapped_olmoe(capsys, checkpoint, tmp_path):
    assert run(capsys, "swap", checkpoint, "--out", tmp_path / "swapped")[0] == 0
    code, text, _ = run(capsys, "export", tmp_path / "swapped", "--out", tmp_path / "alone")
    assert code == 0
    assert "trust_remote_code=True" in text
    assert (tmp_path / "alone" / "modeling_l2r_olmoe.py").is_file()
    ids = sample_tokens()
    with torch.no_grad():
        swapped = load_pretrained(tmp_path / "swapped")(ids).logits
        torch.testing.assert_close(load_pretrained(tmp_path / "alone")(ids).logits, swapped)


def test_export_refuses_other_models(capsys, checkpoint, tmp_path):
    assert "remote code is for OLMoE" in refused(
        capsys, "export", checkpoint, "--out", tmp_path / "alone"
    )
    assert not (tmp_path / "alone").exists()


def test_a_bf16_checkpoint_stays_bf16_with_fp32_routers(capsys, checkpoint, text_folder, tmp_path):
    narrow = tmp_path / "bf16"
    shutil.copytree(checkpoint, narrow)
    load_pretrained(checkpoint).bfloat16().save_pretrained(narrow)
    code, _, err = run(capsys, "swap", narrow, "--rank", 2, "--heads", 4, "--out", tmp_path / "one")
    assert code == 0, err
    code, text, err = run(
        capsys, "upcycle", narrow, "--rank", 2, "--heads", 4, "--text", text_folder,
        "--tokens", 600, "--held-out", 300, "--sequence-length", 32, "--train-steps", 1,
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
