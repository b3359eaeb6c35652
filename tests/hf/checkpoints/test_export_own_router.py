"""Export with a router of one's own: a folder that opens, or one line that says why not."""

import sys
import types

import pytest

from l2r.hf.checkpoints.export import export_remote_code
from l2r.hf.swap import swap_routers
from l2r.hf.swap.families import FAMILIES
from l2r.routers.config import ROUTERS
from tests.hf.checkpoints.test_export import load_without_l2r
from tests.hf.families import tiny_model

FILE = """
import dataclasses
{line}

from l2r.routers.linear import LinearConfig, LinearRouter
from l2r.routers.base import register_router


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnConfig(LinearConfig):
    extra: int = 4


@register_router({name!r})
class OwnRouter(LinearRouter):
    Config = OwnConfig
"""


@pytest.fixture
def swapped(tmp_path, monkeypatch):
    """A maker of models whose routers come from a file, or a package's, with one more line."""
    monkeypatch.syspath_prepend(tmp_path)
    before, modules = dict(ROUTERS), set(sys.modules)

    def make(line, module="export_own"):
        path = tmp_path / (module.replace(".", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        (path.parent / "beside.py").write_text("def double(x):\n    return 2 * x\n")
        path.write_text(FILE.format(line=line, name=f"own_{module}"))
        own = __import__(module, fromlist=["OwnConfig"])
        return swap_routers(tiny_model(FAMILIES["mixtral"]), own.OwnConfig())

    yield make
    ROUTERS.clear()
    ROUTERS.update(before)
    for name in set(sys.modules) - modules:
        if name.split(".")[0] in ("export_own", "export_pkg", "imports", "beside"):
            del sys.modules[name]


ALLOWED = """
import math, os.path, torch.nn.functional, numpy, safetensors.torch
from transformers.activations import ACT2FN  # a table
from jaxtyping import Float
from l2r import (
    Router as Base,
    build_router,
)
assert issubclass(Base, torch.nn.Module)
"""


@pytest.mark.slow("a fresh process")
def test_what_may_be_imported_opens_without_this_package(swapped, tmp_path):
    model = swapped(ALLOWED).eval()
    folder = export_remote_code(model, tmp_path / "out")
    assert "loaded L2rMixtral" in load_without_l2r({folder: model}, tmp_path)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("import l2r", "import l2r"),
        ("import l2r.routers as routers", "import l2r.routers"),
        ("import math, l2r", "import math, l2r"),
        ("from l2r import routers", "from l2r import routers"),
        ("from l2r import __version__", "from l2r import __version__"),
        ("from l2r.routers import *", "from l2r.routers import *"),
        ("from l2r import Router; half = 0.5", "from l2r import Router"),
        ("import jaxtyping", "import jaxtyping"),
        ("from jaxtyping import UInt8", "from jaxtyping import UInt8"),
        ("import packaging", "import packaging"),
        ("from beside import double", "from beside import double"),
        ("def late():\n    import beside", "import beside"),
    ],
)
def test_other_imports_are_refused_with_the_file_and_what_is_allowed(
    line, named, swapped, tmp_path
):
    with pytest.raises(ValueError, match=r"export_own\.py, line \d+") as refusal:
        export_remote_code(swapped(line), tmp_path / "out")
    message = str(refusal.value)
    assert f" {named}" in message and "\n" not in message
    assert "from l2r" in message and "the standard library, torch, transformers" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "line",
    [
        "from .beside import double",
        "from .bisect import double",  # named as one of the standard library
        "from . import beside",
        "import export_pkg.beside",
    ],
)
def test_files_beside_a_router_are_not_copied_and_so_refused(line, swapped, tmp_path):
    (tmp_path / "export_pkg").mkdir()
    (tmp_path / "export_pkg" / "bisect.py").write_text("def double(x):\n    return 2 * x\n")
    with pytest.raises(ValueError, match=r"router\.py, line 3.*the standard library, torch"):
        export_remote_code(swapped(line, "export_pkg.router"), tmp_path / "out")


def test_a_file_that_would_have_the_name_of_one_of_the_package_is_refused(swapped, tmp_path):
    with pytest.raises(ValueError, match=r"imports\.py.*two files.*imports and l2r\.imports"):
        export_remote_code(swapped("", "imports"), tmp_path / "out")


def test_a_router_of_the_program_that_runs_is_refused(swapped, tmp_path, monkeypatch):
    model = swapped("")
    monkeypatch.setattr(sys.modules["export_own"].OwnRouter, "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    sys.modules["__main__"].__file__ = str(tmp_path / "export_own.py")
    with pytest.raises(ValueError, match=r"__main__.*file of its own"):
        export_remote_code(model, tmp_path / "out")
