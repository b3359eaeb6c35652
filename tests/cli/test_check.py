"""``l2r check`` from the command line: one line a check, and an exit code for scripts."""

import json

import pytest
import torch
import yaml

from l2r.hf.models.vit import L2rViTConfig, L2rViTForImageClassification
from l2r.hf.swap.families import FAMILIES
from l2r.text.manifest import TokenizerIdentity
from l2r.text.token_writer import write_token_files
from tests.analysis.diagnostics.models import ours
from tests.hf.families import tiny_model

SHORT = ["--instances", "8", "--length", "32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Token files, a run of ours, a healthy Mixtral and one whose only weight is always 1."""
    root = tmp_path_factory.mktemp("check")
    generator = torch.Generator().manual_seed(0)
    words = [torch.randint(3, 60, (40,), generator=generator).tolist() for _ in range(9)]
    identity = TokenizerIdentity(name="numbers", vocab_size=64, eos_token_id=0, sha256="0" * 64)
    write_token_files(root / "tokens", {"words": words}, tokenizer=identity)
    ours().save_pretrained(root / "run" / "model")
    recipe = {"losses": {"balance": 0.02, "z": 0.001}}
    (root / "run" / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    mixtral = tiny_model(FAMILIES["mixtral"])
    mixtral.config.output_router_logits = True
    mixtral.save_pretrained(root / "healthy")
    mixtral.config.num_experts_per_tok = 1
    mixtral.save_pretrained(root / "top1")
    return root


def test_a_healthy_checkpoint_ends_with_0_and_its_verdict_comes_first(l2r, folder):
    code, out, err = l2r("check", folder / "healthy", "--data", folder / "tokens", *SHORT)
    verdict, *lines = out.splitlines()
    assert code == 0, err
    assert verdict == f"{folder / 'healthy'} has 0 faults and 0 warnings in {len(lines)} checks."
    assert all(line.startswith("ok ") for line in lines)


@pytest.mark.parametrize("value", [None, "high", [0.1]])
def test_a_weight_of_a_recipe_that_is_no_number_is_named(l2r, folder, tmp_path, value):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(folder / "run" / "model")
    (tmp_path / "run" / "recipe.yaml").write_text(yaml.safe_dump({"losses": {"z": value}}))
    line = l2r("check", tmp_path / "run", "--data", folder / "tokens", *SHORT).refusal()
    assert f"losses.z in {tmp_path / 'run' / 'recipe.yaml'} must be a number; got {value!r}" in line


def test_a_fault_ends_with_1_and_has_a_remedy(l2r, folder):
    """One normalized weight is always 1, so that the task trains no router."""
    code, out, _ = l2r("check", folder / "top1", "--data", folder / "tokens", *SHORT, "--json")
    findings = {record["check"]: record for record in json.loads(out)}
    assert code == 1
    found = findings["gradient"]
    assert found["status"] == "fault" and "always 1" in found["found"] and found["remedy"]


def test_with_out_the_findings_are_a_page_and_a_file_too(l2r, folder, tmp_path):
    given = ["check", folder / "top1", "--data", folder / "tokens", *SHORT]
    code, out, err = l2r(*given, "--out", tmp_path / "seen", "--json")
    assert code == 1 and str(tmp_path / "seen" / "index.html") in err.replace("\n", "")
    assert json.loads((tmp_path / "seen" / "check.json").read_text()) == json.loads(out)
    page = (tmp_path / "seen" / "index.html").read_text()
    assert "gradient: fault" in page and "always 1" in page and "Is top1 healthy?" in page


def test_without_data_text_is_read_in_the_checkpoints_own_tokens(
    l2r, checkpoint, small_tokenizer, monkeypatch, tmp_path
):
    """No more files are read than it takes, and no corpus is built or kept."""

    def questions():
        for number in range(9):
            assert number < 3, "a file is read that is not needed"
            yield f"{number}.txt", f"Question {number}: what is the answer? Answer: yes " * 30

    source = "l2r.text.sources.embedded_sources"
    monkeypatch.setattr(source, lambda version: {"questions": questions})
    monkeypatch.setenv("L2R_CACHE", str(tmp_path / "cache"))
    read = []
    check = "l2r.analysis.diagnostics.checks.table.check_model"
    monkeypatch.setattr(check, lambda model, batch, **_: read.append(batch["input_ids"]) or [])
    code, _, err = l2r("check", checkpoint, *SHORT)
    assert code == 0, err
    (rows,) = read
    assert "what is the answer?" in small_tokenizer.decode(rows[0]) and rows.shape == (8, 32)
    assert not (tmp_path / "cache").exists()


def test_a_folder_without_a_tokenizer_gets_a_line_that_says_what_to_pass(l2r, folder):
    for command in (("check",), ("diagnose",), ("mismatch", "--against", "bf16")):
        line = l2r(command[0], folder / "healthy", *command[1:]).refusal()
        assert f"put its tokenizer.json into {folder / 'healthy'}, or pass" in line
        assert "token files as --data" in line


def test_a_run_is_checked_with_the_losses_of_its_recipe(l2r, folder):
    data = ["--data", folder / "tokens"]
    for more, words in (
        ([], "off in the model; the training adds one of weight 0.02"),
        (["--balance", "0"], "off: the model's loss has no balance loss"),
    ):
        _, out, _ = l2r("check", folder / "run", *data, *SHORT, *more)
        (line,) = (line for line in out.splitlines() if "auxiliary loss:" in line)
        assert words in line


def test_bad_input_is_one_line(l2r, folder, tmp_path):
    assert (
        "instances must be >= 2; got 1" in l2r("check", folder / "run", "--instances", 1).refusal()
    )
    assert "hub id" in l2r("check", tmp_path / "nothing" / "at" / "all").refusal()
    dense = folder / "healthy" / "generation_config.json"
    assert "checkpoint must be a folder" in l2r("check", dense).refusal()


def test_an_image_classifier_is_checked_on_its_images(l2r, tmp_path):
    config = L2rViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_experts=4,
        num_labels=10,
        moe_layers=[1],
        router={"kind": "l2r_sips", "rank": 2, "heads": 2},
    )
    L2rViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    more = ["--data", "digits", "--balance", "0.01", "--json"]
    code, out, err = l2r("check", tmp_path / "vit", *more)
    status = {record["check"]: record["status"] for record in json.loads(out)}
    assert code == 0, (out, err)
    assert status["gradient"] == "ok" and status["padding"] == "skipped"
