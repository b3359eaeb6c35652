"""Folders that older versions wrote open, and compute what they computed then.

The archives are made by scripts/proofs/older_folders.py: 0.3.0 is that release, 89d79bcd the last
commit before checkpoints of stock models were tested as they lie on disk.
"""

import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import peft
import pytest
import torch

from l2r import Routes, capture, load_pretrained, record, replay
from l2r.files.diagnosis import read_diagnosis

ARCHIVES = Path(__file__).parents[1] / "fixtures"
VERSIONS = ("0.3.0", "89d79bcd")
FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3")
IDS = torch.arange(24).view(1, 24) * 7 % 64
PIXELS = torch.linspace(-1, 1, 64).view(1, 1, 8, 8)
# The largest sum in these models has 64 terms, each rounded once.
ROUNDING = 64 * torch.finfo(torch.float32).eps


@pytest.fixture(scope="module", params=VERSIONS)
def older(request, tmp_path_factory):
    """The folders of one version, unpacked; tests change copies."""
    root = tmp_path_factory.mktemp("older")
    with tarfile.open(ARCHIVES / f"{request.param}.tar.xz") as archive:
        archive.extractall(root, filter="data")
    return root


@pytest.fixture
def here(older, tmp_path, monkeypatch):
    """The folders, copied, as the current one: recipes name their text by a relative path."""
    shutil.copytree(older, tmp_path / "older")
    monkeypatch.chdir(tmp_path / "older")
    return tmp_path / "older"


def opened(folder: Path, name: str):
    if name != "adapter":
        return load_pretrained(folder / name).eval()
    model = load_pretrained(folder / "swapped" / "mixtral")
    return peft.PeftModel.from_pretrained(model, folder / name).eval()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
def test_every_model_computes_what_it_did(older):
    with np.load(older / "expected.npz") as file:
        expected = dict(file)
    names = [name for name in expected if ":" not in name]
    runs = {f"runs/{path.name}" for path in (older / "runs").iterdir()}
    assert len(runs) == 12  # kinds of routers
    assert runs | {"vision", "adapter", *(f"swapped/{family}" for family in FAMILIES)} == set(names)
    for name in names:
        model = opened(older, name)
        with torch.no_grad(), capture(model) as seen:
            logits = model(PIXELS if name == "vision" else IDS).logits.flatten(0, -2)
        found = {name: logits} | {f"{name}:{n}": x for n, x in enumerate(seen.logits())}
        assert sum(key.startswith(f"{name}:") for key in expected) == len(found) - 1 > 0
        for key, value in found.items():
            atol = ROUNDING * np.abs(expected[key]).max()
            np.testing.assert_allclose(value[-4:], expected[key], rtol=0, atol=atol, err_msg=key)


def test_routes_are_read_and_replayed(older):
    routes = Routes.load(older / "routes.npz")
    model = load_pretrained(older / "swapped" / "deepseek_v3").eval()
    with torch.no_grad(), record(model) as recorder:
        model(IDS)
    assert all(map(np.array_equal, routes.experts, recorder.routes().experts))
    with torch.no_grad(), replay(model, routes):
        model(IDS)


@pytest.mark.slow("commands on many folders")
def test_commands_read_the_folders(here, l2r):
    folders = [*sorted((here / "runs").iterdir()), here / "vision"]
    for folder in folders:
        assert l2r("check", folder).code in (0, 1), folder
    few = ("--instances", 2, "--length", 16, "--sample", 16, "--certify", 0, "--gain", 0)
    ended = l2r("diagnose", here / "runs" / "xmoe", *few, "--out", here / "page")
    assert ended.code == 0, ended
    shutil.copytree(here / "diagnosis" / "linear", here / "runs" / "linear", dirs_exist_ok=True)
    numbers = json.loads((here / "runs" / "linear" / "diagnosis.json").read_text())["mean"]
    assert read_diagnosis(here / "runs" / "linear").mean() == numbers
    ended = l2r("report", here / "runs", "--out", here / "report.html")
    assert ended.code == 0, ended
    for family in FAMILIES:
        source, new = here / "swapped" / family, here / f"new-{family}"
        ended = l2r("swap", source, "router.kind=linear", "--out", new)
        assert ended.code == 0, ended
        assert load_pretrained(new)(IDS).logits.isfinite().all()


@pytest.mark.slow("a training")
def test_an_unfinished_run_goes_on(here, l2r):
    run = here / "unfinished"
    before = (run / "metrics.jsonl").read_text().splitlines()
    ended = l2r("train", run / "recipe.yaml", "--out", run)
    assert ended.code == 0, ended
    after = (run / "metrics.jsonl").read_text().splitlines()
    assert after[: len(before) // 2] == before[: len(before) // 2] and len(after) > 400
    assert load_pretrained(run)(IDS).logits.isfinite().all()
