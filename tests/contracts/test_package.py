"""What the packages promise about themselves: light import, facades, extras, versions."""

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import l2r

ROOT = Path(__file__).resolve().parents[2]


def test_every_export_exists_and_is_listed():
    assert all(hasattr(l2r, name) for name in l2r.__all__)
    assert set(l2r.__all__) <= set(dir(l2r)) and len(set(l2r.__all__)) == len(l2r.__all__)
    with pytest.raises(AttributeError, match="module 'l2r' has no attribute 'swap_router'"):
        _ = l2r.swap_router


@pytest.mark.slow("fresh processes")
def test_import_l2r_is_light_and_the_first_ten_minutes_need_one_import():
    """What is listed before anything heavy is imported, and that an import brings it.

    A command's help needs the packages of commands alone. Language models are diagnosed and
    evaluated without an image package.
    """
    heavy = {"torch", "numpy", "transformers", "plotly", "pydantic", "typer", "rich"}
    names = ("build_router", "swap_routers", "capture", "load_balancing_loss", "router_z_loss")
    script = f"""
import sys, l2r
sys.modules["PIL"] = None
listed = set(dir(l2r))
assert not ({heavy!r} | {{"l2r.hf.models"}}) & set(sys.modules)
from l2r.cli import main
for words in (["--help"], ["mismatch", "--help"]):
    try:
        main(words)
    except SystemExit:
        loaded = ({heavy!r} - {{"typer", "rich", "pydantic"}} | {{"jaxtyping"}}) & set(sys.modules)
        assert not loaded, (words, loaded)
from l2r import {", ".join(names)}, load_pretrained, L2rOlmoeConfig, L2rOlmoeForCausalLM
assert {{*{names!r}, "load_pretrained", "L2rOlmoeConfig", "L2rOlmoeForCausalLM"}} <= listed
from l2r.hf import models
assert L2rOlmoeForCausalLM is models.L2rOlmoeForCausalLM
import l2r.analysis.inputs, l2r_lab.training.evaluation.whole_checkpoint, l2r_lab.training.language
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-1500:]


FACADES = sorted(
    ".".join(path.parent.relative_to(ROOT / "src").parts)
    for path in (ROOT / "src").rglob("__init__.py")
    if "lazy_names(" in path.read_text()
)


@pytest.mark.parametrize("package", FACADES)
def test_every_name_of_a_facade_is_there_and_is_no_module(package):
    """A module of the same name would take its place in the package once it is imported."""
    facade = importlib.import_module(package)
    assert set(facade.__all__) <= set(dir(facade))
    for name in facade.__all__:
        value = getattr(facade, name)
        assert not inspect.ismodule(value) or value.__name__ == f"{package}.{name}"
        assert inspect.ismodule(value) or importlib.util.find_spec(f"{package}.{name}") is None


def test_rooms_that_others_import_as_a_whole_are_facades():
    library = ("hf.models", "hf.swap", "hf.routes", "hf.checkpoints", "text", "images")
    library += ("fitting", "analysis")
    laboratory = ("training", "vision", "studies", "planning")
    wanted = {f"l2r.{name}" for name in library} | {f"l2r_lab.{name}" for name in laboratory}
    assert sorted(wanted - set(FACADES)) == []


def test_few_files_of_the_library_share_a_name():
    """Those that the engines dictate are left out."""
    root = ROOT / "src" / "l2r"
    dictated = {"__init__.py", "checkpoint.py", "olmoe.py", "routes.py", "settings.py"}
    names = [path.name for path in root.rglob("*.py") if path.name not in dictated]
    shared = sorted({name for name in names if names.count(name) > 1})
    assert len(shared) <= 20, shared


def test_version_is_the_changelogs_newest():
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.M)
    assert newest is not None and newest.group(1) == l2r.__version__
