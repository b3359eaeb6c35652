"""``l2r mismatch`` from the command line."""

import copy
import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

from l2r import L2RConfig, record
from l2r.cli.mismatch import _has_codes
from l2r.files.mismatch import Mismatch
from l2r.files.reading import parse_json
from l2r.hf.routes import Routes, to_vllm
from l2r.hf.routes.fingerprint import tokenizer_digest
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.swap import replace_routers
from l2r.text.manifest import TokenizerIdentity
from l2r.text.token_writer import write_token_files
from tests.analysis.diagnostics.models import SIZES, ours, stock
from tests.hf.families import tiny_model

pytestmark = pytest.mark.usefixtures("coarse")

SHORT = ["--instances", "8", "--length", "16", "--batch-size", "3", "--device", "cpu"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A model with our router, a stock one, and token files of two domains."""
    root = tmp_path_factory.mktemp("mismatch")
    ours().save_pretrained(root / "ours")
    stock().save_pretrained(root / "stock")
    generator = torch.Generator().manual_seed(0)
    documents = {
        name: [torch.randint(low, 60, (40,), generator=generator).tolist() for _ in range(8)]
        for name, low in (("one", 2), ("two", 30))
    }
    identity = TokenizerIdentity(name="numbers", vocab_size=64, eos_token_id=0, sha256="0" * 64)
    write_token_files(root / "tokens", documents, tokenizer=identity)
    reverse = {name: [part[::-1] for part in parts] for name, parts in documents.items()}
    write_token_files(root / "other", reverse, tokenizer=identity)
    return root


@pytest.mark.parametrize("checkpoint", ["ours", "stock"])
def test_json_files_and_page_have_the_same_numbers(l2r, root, tmp_path, checkpoint):
    more = ["--data", root / "tokens", "--against", "fp8", "--out", tmp_path, "--json"]
    code, out, err = l2r("mismatch", root / checkpoint, *SHORT, *more)
    assert code == 0, err
    record = json.loads(out)
    assert record == json.loads((tmp_path / "mismatch.json").read_text())
    assert (record["checkpoint"], record["against"]) == (checkpoint, "fp8")
    assert (record["tokens"], record["layers"]) == (128, 2)
    assert 0 < record["certified"] <= 1 and record["certified_changed"] == 0
    costs = record["log_probability"]
    assert costs["own"]["mean"] > 0 and costs["replayed"]["kl"] > 0
    result = Mismatch.read(tmp_path / "mismatch.npz")
    assert result.summary()["layer"] == record["layer"]
    assert "fp8 weights" in (tmp_path / "index.html").read_text()


def test_numbers_of_a_model_that_uses_all_experts_are_json(l2r, root, tmp_path):
    """Its margins are infinite: there is no other expert."""
    torch.manual_seed(0)
    model = OlmoeForCausalLM(OlmoeConfig(**{**SIZES, "num_experts": SIZES["num_experts_per_tok"]}))
    model.save_pretrained(root / "all")
    more = ["--data", root / "tokens", "--against", "fp8", "--out", tmp_path, "--json"]
    code, out, err = l2r("mismatch", root / "all", *SHORT, *more)
    assert code == 0, err
    record = parse_json(out.encode())
    assert record == parse_json((tmp_path / "mismatch.json").read_bytes())
    assert record["decisions_changed"] == 0 and record["margin"] == []
    code, out, err = l2r("mismatch", root / "all", *SHORT, *more[:-1])
    assert code == 0 and "by layer" in out and "by margin" not in out, err  # "inf to inf"


@pytest.mark.parametrize("option", ["--out", "--record"])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(l2r, tmp_path, option):
    (tmp_path / "file").write_text("")
    where = tmp_path / "file" / "routes.npz" if option == "--record" else tmp_path / "file"
    line = l2r("mismatch", "nowhere", "--against", "bf16", option, where).refusal()
    assert f"cannot use {tmp_path / 'file'}" in line


def test_the_terminal_says_the_verdict_first_within_80_columns(l2r, root, tmp_path):
    more = ["--data", root / "tokens", "--against", "int8", "--out", tmp_path]
    code, out, err = l2r("mismatch", root / "ours", *SHORT, *more)
    assert code == 0, err
    first, *rest = out.splitlines()
    assert "of 128 tokens take other experts with int8 weights in at least one of 2 layers" in first
    assert max(len(line.rstrip()) for line in rest if not line.startswith("page:")) <= 80
    for words in ("by layer", "certified, changed", "same experts", "by margin"):
        assert words in out


def test_recorded_routes_differ_in_nothing_from_the_same_run(l2r, root, tmp_path):
    text = ["--data", root / "tokens", *SHORT]
    routes = tmp_path / "routes.safetensors"
    assert l2r("mismatch", root / "ours", *text, "--record", routes).code == 0
    recorded = routes.read_bytes()
    again = l2r("mismatch", root / "ours", *text, "--record", routes, "--against", routes)
    assert "record must be a new file" in again.refusal() and routes.read_bytes() == recorded
    against = ["--against", routes, "--out", tmp_path / "out", "--json"]
    code, out, err = l2r("mismatch", root / "ours", *text, *against)
    assert code == 0, err
    record = json.loads(out)
    assert record["tokens_changed"] == 0 and record["certified"] is None
    assert record["log_probability"]["own"]["largest"] < 1e-5


def words_tokenizer(*words):
    vocabulary = {word: number for number, word in enumerate(["<unk>", "</s>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def test_recorded_routes_of_other_tokens_are_refused(l2r, root, tmp_path):
    """Of as many sequences, of the same lengths."""
    routes = tmp_path / "routes.safetensors"
    text = ["--data", root / "tokens", *SHORT]
    assert l2r("mismatch", root / "ours", *text, "--record", routes).code == 0
    changed = ["--data", root / "other", *SHORT, "--against", routes, "--out", tmp_path / "out"]
    line = l2r("mismatch", root / "ours", *changed).refusal()
    assert f"routes are of other tokens: {routes} " in line
    assert not (tmp_path / "out").exists()


def test_recorded_routes_of_another_tokenizer_are_refused(l2r, root, tmp_path):
    text, routes = ["--data", root / "tokens", *SHORT], tmp_path / "routes.safetensors"
    for name, words in (("one", "a b"), ("two", "b a")):
        ours().save_pretrained(tmp_path / name)
        words_tokenizer(*words.split()).save_pretrained(tmp_path / name)
    assert l2r("mismatch", tmp_path / "one", *text, "--record", routes).code == 0
    assert Routes.load(routes).fingerprint.tokenizer == tokenizer_digest(words_tokenizer("a", "b"))
    against = ["--against", routes, "--out", tmp_path / "out"]
    line = l2r("mismatch", tmp_path / "two", *text, *against).refusal()
    assert "routes and model must have the same tokenizer" in line


def test_routes_that_do_not_name_their_tokens_are_not_checked(l2r, root, tmp_path):
    recorded, bare = tmp_path / "recorded.safetensors", tmp_path / "bare.safetensors"
    text = ["--data", root / "tokens", *SHORT, "--out", tmp_path / "out"]
    assert l2r("mismatch", root / "ours", *text, "--record", recorded).code == 0
    Routes.load(recorded).save(bare)
    for path, said in ((recorded, False), (bare, True)):
        code, _, err = l2r("mismatch", root / "ours", *text, "--against", path)
        assert code == 0 and ("not checked" in err) == said, err


def test_another_checkpoint_and_answers_of_a_server(l2r, root, tmp_path):
    text = ["--data", root / "tokens", *SHORT, "--out", tmp_path, "--json"]
    code, out, err = l2r("mismatch", root / "ours", *text, "--against", root / "ours")
    assert code == 0 and json.loads(out)["tokens_changed"] == 0, err
    model, tokens = ours(), torch.arange(2, 12)
    with torch.no_grad(), record(model) as recorder:
        model(tokens[None, :-1])
    (experts,) = to_vllm(recorder.routes().extended(1))
    choice = {"prompt_token_ids": [2, 3], "token_ids": list(range(4, 12))}
    answers = tmp_path / "answers.jsonl"
    answers.write_text(json.dumps({"choices": [{**choice, "routed_experts": experts}]}))
    more = ["--against", "vllm", "--answers", answers]
    code, out, err = l2r("mismatch", root / "ours", *text, *more)
    assert code == 0, err
    assert json.loads(out)["tokens"] == 9 and json.loads(out)["tokens_changed"] == 0


def test_a_checkpoint_against_its_swap_says_what_the_swap_changed(l2r, root, tmp_path):
    """And the other way round; the loss is transformers' own of both."""
    plain = tiny_model(FAMILIES["mixtral"])
    other = replace_routers(copy.deepcopy(plain), L2RConfig(rank=4, heads=2))
    for name, model in (("plain", plain), ("swapped", other)):
        model.save_pretrained(tmp_path / name)
    text = ["--data", root / "tokens", *SHORT, "--out", tmp_path / "out"]
    code, out, err = l2r(
        "mismatch", tmp_path / "plain", *text, "--against", tmp_path / "swapped", "--json"
    )
    assert code == 0, err
    found = json.loads(out)
    result = Mismatch.read(tmp_path / "out" / "mismatch.npz")
    ids = torch.from_numpy(np.array([int(piece) for piece in result.pieces])[result.tokens])
    ids = ids.view(len(result.lengths), -1)
    with torch.no_grad():
        losses = [float(model(ids, labels=ids).loss) for model in (plain, other)]
    assert found["log_probability"]["own"]["loss"] == pytest.approx(
        losses[1] - losses[0], rel=1e-3, abs=1e-6
    )
    assert 0 < found["experts_kept"] < 1 and found["certified"] is None
    code, out, err = l2r("mismatch", tmp_path / "swapped", *text, "--against", tmp_path / "plain")
    assert code == 0, err
    assert " of all choices stay. The loss " in out.replace("\n", " ")
    assert max(map(len, out.splitlines()[1:-1])) <= 80
    assert "these are L2RRouter and MixtralTopKRouter" in (tmp_path / "out/index.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "against must say what to compare with"),
        (["--against", "vllm"], "go with --against vllm or sglang"),
        (["--against", "bf16", "--answers", "{stock}"], "go with --against vllm or sglang"),
        (
            ["--against", "fp4"],
            "--against must be one of bf16, int8, fp8, vllm, sglang, a file",
        ),
        (["--against", "{stock}"], "same model_type"),
        (["--against", "bf16", "--batch-size", "0"], "batch-size must be >= 1; got 0"),
        (["--against", "bf16", "--length", "1"], "--length must be >= 2; got 1"),
    ],
)
def test_bad_input_is_one_line(l2r, root, tmp_path, arguments, message):
    filled = [argument.format(stock=root / "stock") for argument in arguments]
    ended = l2r("mismatch", root / "ours", "--data", root / "tokens", *filled, "--out", tmp_path)
    assert message in ended.refusal()


@pytest.mark.parametrize("packed", [(), ("one",), ("other",), ("one", "other")])
def test_codes_on_either_side_are_read_in_their_own_dtype(packed, tmp_path):
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        codes = {"quantization_config": {"quant_method": "compressed-tensors"}}
        config = {"model_type": "olmoe", **(codes if name in packed else {})}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    sides = tmp_path / "one", tmp_path / "other"
    assert _has_codes(*sides, str(sides[1])) == bool(packed)
    assert _has_codes(sides[0], None, "routes.safetensors") == ("one" in packed)
    if "one" in packed:
        with pytest.raises(ValueError, match="against int8 has no meaning"):
            _has_codes(sides[0], None, "int8")
