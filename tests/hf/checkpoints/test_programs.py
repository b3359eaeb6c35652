"""Exported programs give the model's logits, for other shapes than the one traced too."""

import re

import pytest
import torch
from huggingface_hub import ModelCard

from l2r.hf.checkpoints import programs
from l2r.hf.checkpoints.programs import export_program
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from tests.hf.families import TINY

SHAPES = [(5, 9), (1, 33)]  # neither traced nor compared while exporting


@pytest.fixture
def model():
    sizes = {k: v for k, v in TINY.items() if k != "moe_intermediate_size"}
    router = {"kind": "l2r_sips", "rank": 2, "heads": 4}
    config = L2rOlmoeConfig(**{**sizes, "num_hidden_layers": 1}, num_experts=8, router=router)
    return L2rOlmoeForCausalLM(config).eval()


def agrees(run, model):
    for shape in SHAPES:
        ids = torch.randint(3, TINY["vocab_size"], shape)
        with torch.no_grad():
            wanted = model(ids).logits
        torch.testing.assert_close(run(ids), wanted, rtol=0, atol=1e-4)


def loaded(folder, library):
    """The program as its card says that it is loaded."""
    card = ModelCard((folder / "README.md").read_text())
    assert card.data.library_name == library and card.data.pipeline_tag == "text-generation"
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.S)
    scope = {}
    exec(code.replace("FOLDER", str(folder)), scope)
    return scope["program"]


@pytest.mark.slow("an exporter")
def test_torch_export(l2r, model, tmp_path):
    model.save_pretrained(tmp_path / "m")
    code, text, err = l2r(
        "export", tmp_path / "m", "--format", "torch-export", "--out", tmp_path / "p"
    )
    assert code == 0, err
    assert "(tolerance 0.0001 of that)" in text
    agrees(loaded(tmp_path / "p", "pytorch"), model)


@pytest.mark.slow("an exporter")
def test_onnx(model, tmp_path):
    pytest.importorskip("onnxruntime", reason="the onnx extra is not installed")
    found = export_program(model, tmp_path / "p", form="onnx")
    assert found.difference <= 1e-4 * max(1, found.largest)
    session = loaded(tmp_path / "p", "onnx")
    assert [i.shape for i in session.get_inputs()] == [["batch", "length"]]
    agrees(lambda ids: torch.from_numpy(session.run(None, {"input_ids": ids.numpy()})[0]), model)


@pytest.mark.parametrize("spoil", [lambda x: x.bfloat16().float(), lambda x: x * float("nan")])
def test_a_program_that_differs_is_refused_and_leaves_nothing(spoil, model, tmp_path, monkeypatch):
    """What is written is not looked at here: something else stands in its place."""

    def other(program, folder):
        (folder / "model.pt2").touch()
        return lambda ids: spoil(model(ids).logits) if len(ids) == 3 else model(ids).logits

    monkeypatch.setattr(programs, "_trace", lambda model, ids: None)
    monkeypatch.setitem(programs.PROGRAM_FORMS, "torch-export", other)
    with pytest.raises(ValueError, match=r"must be within tolerance=0.0001 .* they differ by"):
        export_program(model, tmp_path / "p", form="torch-export")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_exported_is_refused_in_one_line(l2r, tmp_path, model):
    model.save_pretrained(tmp_path / "m")
    out = ("--out", tmp_path / "p")
    wrong = l2r("export", tmp_path / "m", *out, "--format", "aot").refusal()
    assert "'--format': 'aot' is not one of 'hf', 'onnx', 'torch-export'" in wrong
    assert "tolerance is for" in l2r("export", tmp_path / "m", *out, "--tolerance", 1).refusal()
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
