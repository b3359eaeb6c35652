"""``l2r diagnose`` and ``l2r landscape`` from the command line, on checkpoints side by side."""

import json

import pytest
import torch
from safetensors.numpy import load_file

from l2r.cli.diagnose import names
from l2r.files.arrays import TextRouting
from l2r.text.manifest import TokenizerIdentity
from l2r.text.token_writer import write_token_files
from tests.analysis.diagnostics.models import ours, stock

pytestmark = pytest.mark.usefixtures("coarse")

SHORT = ["--instances", "8", "--length", "16", "--sample", "64", "--certify", "3"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A model with our router, a stock one, and token files of two domains."""
    root = tmp_path_factory.mktemp("diagnose")
    ours(heads=3).save_pretrained(root / "l2r_sips")
    stock().save_pretrained(root / "stock")
    generator = torch.Generator().manual_seed(0)
    documents = {
        name: [torch.randint(low, 60, (40,), generator=generator).tolist() for _ in range(8)]
        for name, low in (("one", 2), ("two", 30))
    }
    identity = TokenizerIdentity(name="numbers", vocab_size=64, eos_token_id=0, sha256="0" * 64)
    write_token_files(root / "tokens", documents, tokenizer=identity)
    return root


def test_two_checkpoints_side_by_side_give_numbers_files_and_a_page(l2r, checkpoints, tmp_path):
    paths = [checkpoints / "l2r_sips", checkpoints / "stock"]
    data = ["--data", checkpoints / "tokens"]
    more = ["--over-time", "--out", tmp_path, "--json"]
    code, out, err = l2r("diagnose", *paths, *data, *SHORT, *more)
    assert code == 0, err
    records = json.loads(out)
    assert [record["checkpoint"] for record in records] == ["l2r_sips", "stock"]
    for record in records:
        assert 0 < record["certified_top1"] <= record["found_top1"]
        assert 0 <= record["stability"] <= 1
        assert 0 < record["coactivation"] <= 1 and record["routing_gain"] != 0
    assert records[0]["effective_heads"] >= 1
    assert records[1]["effective_heads"] is None
    saved = json.loads((tmp_path / "stock" / "diagnosis.json").read_text())
    assert saved["info"]["domains"] == ["one", "two"]
    assert saved["info"]["tokens"] == 8 * 16
    over_time = saved["info"]["over_time"]  # as if the two were of one run
    assert over_time["checkpoints"] == ["l2r_sips", "stock"] and over_time["top1"][1] == [1, 1]
    arrays = load_file(tmp_path / "l2r_sips" / "diagnosis.safetensors")
    assert arrays["1.sample_query"].shape == (64, 2)
    page = (tmp_path / "index.html").read_text()
    for words in (
        "Certified routing",
        "Geometry of l2r_sips",
        "Expert usage by domain",
        "Layers of",
        "Experts of stock",
        "Agreement of routers",
        "Saturation of stock",
    ):
        assert words in page
    assert page.count("Routing plane, layer") == 2  # two layers, of the rank-2 router alone
    assert "index-text.html" in page and (tmp_path / "index-text.html").is_file()
    text = TextRouting.read(tmp_path / "stock" / "text.npz")
    # Of 1,024 tokens all 128 are shown, by number: the checkpoint has no tokenizer.
    assert text.experts.shape == (2, 8, 16, 2) and text.pieces[0].strip().isdigit()
    assert (text.radius > 0).all()


def test_tables_are_printed_and_certificates_can_be_left_out(l2r, checkpoints, tmp_path):
    short = [*SHORT[:-1], "0", "--text-tokens", "0"]
    data = ["--data", checkpoints / "tokens"]
    code, out, err = l2r("diagnose", checkpoints / "stock", *data, *short, "--out", tmp_path)
    assert code == 0, err
    assert "stability" in out
    page = (tmp_path / "index.html").read_text()
    assert "text.html" not in page and not (tmp_path / "stock" / "text.npz").exists()
    assert "Certified routing" not in out + page and "Geometry, load and anchors" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "checkpoint must be a folder with config.json"),
        (["{stock}", "--length", "1"], "--length must be >= 2; got 1"),
        (["{stock}", "--data", "{tokens}", "--sample", "0"], "sample must be >= 1; got 0"),
        (["{stock}", "--data", "{text}"], "the checkpoint has no tokenizer"),
        (["{stock}", "{stock}"], "checkpoints must differ"),
        (
            ["{stock}", "--data", "{tokens}", "--text-tokens", "1"],
            "at least a token per domain, 2, or 0",
        ),
        (["nowhere", "--text-tokens", "-5"], "--text-tokens must be >= 0; got -5"),
        (["{stock}", "--text", "1024"], "the number of tokens is --text-tokens"),
        (["{stock}", "--text", "cat"], "the checkpoint has no tokenizer"),
        (["nowhere", "--sigma", "-1"], "--sigma must be between 0 and 1,000,000; got -1"),
        (["{stock}", "--gain", "-1"], "gain must be >= 0; got -1"),
        (["{stock}", "--data", "{tokens}", "--device", "cuda:99"], "device must be"),
        (
            ["{stock}", "--data", "{tokens}", "--over-time"],
            "over-time needs several checkpoints, or a run that kept two",
        ),
    ],
)
def test_bad_input_is_one_line(l2r, checkpoints, tmp_path, arguments, message):
    (tmp_path / "note.txt").write_text("words")
    places = {
        "stock": checkpoints / "stock",
        "tokens": checkpoints / "tokens",
        "text": tmp_path / "note.txt",
    }
    filled = [argument.format(**places) for argument in arguments]
    assert message in l2r("diagnose", *filled, "--out", tmp_path / "out").refusal()


def test_a_checkpoint_that_is_not_there_is_refused_before_the_others_are_read(
    l2r, checkpoints, tmp_path
):
    more = ("--data", checkpoints / "tokens", *SHORT, "--out", tmp_path / "out")
    error = l2r("diagnose", checkpoints / "stock", tmp_path / "no/such/one", *more).refusal()
    assert "no/such/one" in error and not (tmp_path / "out").exists()


def test_tokens_of_another_vocabulary_are_refused(l2r, checkpoints, tmp_path):
    identity = TokenizerIdentity(name="large", vocab_size=900, eos_token_id=0, sha256="0" * 64)
    write_token_files(tmp_path / "large", {"a": [[899] * 40]}, tokenizer=identity)
    large = l2r("diagnose", checkpoints / "stock", "--data", tmp_path / "large", *SHORT)
    assert "below the checkpoint's vocab_size 64; got 899" in large.refusal()


def test_names_grow_until_they_differ():
    assert names(["a/x", "b/x"]) == {"a-x": "a/x", "b-x": "b/x"}
    assert names(["runs/one"]) == {"one": "runs/one"}


def test_a_link_is_named_as_the_user_named_it(tmp_path, monkeypatch):
    (tmp_path / "blobs-1f3a").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "blobs-1f3a")
    monkeypatch.chdir(tmp_path / "mine")
    assert names([str(tmp_path / "mine")]) == {"mine": str(tmp_path / "mine")}
    assert names([str(tmp_path / "mine" / ".")]) == {"mine": str(tmp_path / "mine" / ".")}


def test_landscape_writes_a_page(l2r, tmp_path):
    code, _, err = l2r("landscape", "--out", tmp_path / "page.html")
    assert code == 0, err
    page = (tmp_path / "page.html").read_text()
    for words in ("Dot product", "Cosine", "SIPS, beta = 0.25", "k = [-2, 0]"):
        assert words in page
    assert "Score explorer" in page


def test_a_folder_in_the_place_of_a_page_is_refused_by_name_and_reason(l2r, tmp_path):
    refusal = l2r("landscape", "--out", tmp_path).refusal()
    assert refusal == f"error: cannot use {tmp_path}: is a directory"


def test_landscape_takes_the_anchors_of_a_layer(l2r, checkpoints, tmp_path):
    out = tmp_path / "page.html"
    code, _, err = l2r("landscape", checkpoints / "l2r_sips", "--layers", 1, "--out", out)
    assert code == 0, err
    page = out.read_text()
    assert "layer 1: model.layers.1" in page and "layer 0" not in page
    assert len(page) < 200_000  # no plotly


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--reach", "-1"], "reach must be between 0.001 and 1e+06; got -1"),
        (["--seed", "-1"], "seed must be between 0 and 2^63 - 9; got -1"),
        (["--layers", "1"], "layers are read only with a checkpoint; got layers=1"),
        (["{stock}"], "routers with anchors of rank 2"),
        (["nowhere"], "checkpoint must be a folder with config.json"),
    ],
)
def test_landscape_refuses_in_one_line(l2r, checkpoints, tmp_path, arguments, message):
    filled = [argument.format(stock=checkpoints / "stock") for argument in arguments]
    assert message in l2r("landscape", *filled, "--out", tmp_path / "page.html").refusal()
