"""Routers of one's own, imported when their name is asked for, from where the user says alone."""

import pytest

from tests.processes import command, script

ROUTER = """
import dataclasses
from l2r.routers import LinearRouter, LinearConfig, register_router

@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnConfig(LinearConfig):
    extra: int = 4

@register_router("own_router")
class OwnRouter(LinearRouter):
    Config = OwnConfig
"""
ASK = """
import sys
from l2r.routers import RouterConfig, build_router
sizes = dict(hidden_size=8, num_experts=4, top_k=2)
build_router("linear", **sizes)
assert "own_file" not in sys.modules
assert build_router("own-router", extra=3, **sizes).config.to_dict()["kind"] == "own_router"
assert RouterConfig.from_dict({"kind": "own_router", "extra": 2}).extra == 2
assert "own_file" in sys.modules
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a file that registers ``own_router``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_file.py").write_text(ROUTER)
    return tmp_path


def test_modules_of_l2r_import_are_imported_for_a_name_that_is_not_known(folder):
    (folder / "first.py").write_text("")
    script(folder / "out", ASK, L2R_IMPORT="first, own_file,").succeed()


def test_a_module_of_an_installed_package_wins_over_the_working_folder(folder):
    (folder / "json.py").write_text("raise SystemExit('shadowed')")
    code = f"import sys\nsys.modules.pop('json', None)\n{ASK}\nimport json\njson.dumps"
    script(folder / "out", code, L2R_IMPORT="own_file").succeed()


def test_packages_bring_routers_by_an_entry_point(folder):
    (folder / "site" / "own-1.0.dist-info").mkdir(parents=True)
    (folder / "own_file.py").rename(folder / "site" / "own_file.py")
    for name, text in {
        "METADATA": "Metadata-Version: 2.1\nName: own\nVersion: 1.0\n",
        "entry_points.txt": "[l2r.routers]\nown = own_file\n",
    }.items():
        (folder / "site" / "own-1.0.dist-info" / name).write_text(text)
    script(
        folder / "out", f"import sys\nsys.path.append({str(folder / 'site')!r})\n{ASK}"
    ).succeed()


def refused(folder, **environment):
    """What ``l2r train`` says of the router ``own_router``, which it does not get."""
    run = command(folder / "out", "train", "demo/linear", "router.kind=own_router", **environment)
    assert run.wait() == 2 and run.out == ""
    (line,) = run.err.splitlines()
    return line


def test_an_unknown_router_says_how_one_s_own_is_known(folder):
    line = refused(folder)
    assert "unknown router 'own_router'" in line
    assert "import the file that registers it, or name its module in L2R_IMPORT" in line


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ("own_fil", "No module named 'own_fil'"),
        ("own_file,broken", "ZeroDivisionError"),
        ("ends", "SystemExit"),
        (".own_file", "relative"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(folder, modules, reason):
    (folder / "own_file.py").write_text("")
    (folder / "broken.py").write_text("1 / 0")
    (folder / "ends.py").write_text("raise SystemExit(0)")
    line = refused(folder, L2R_IMPORT=modules)
    wrong = modules.split(",")[-1]
    assert f"L2R_IMPORT names {wrong!r}, which cannot be imported: " in line and reason in line


def test_a_configuration_of_a_checkpoint_imports_nothing(folder):
    """Not even where it lies in the working folder and names the file beside it."""
    (folder / "named.py").write_text("")
    code = """
import sys
import pytest
from l2r.routers import RouterConfig
for kind in ("own_file", "own_router", "named", "named.own_file", "os:system"):
    for more in ({}, {"module": "own_file"}, {"L2R_IMPORT": "own_file"}):
        with pytest.raises(ValueError, match="unknown router"):
            RouterConfig.from_dict({"kind": kind, **more})
with pytest.raises(ValueError, match="kind is missing"):
    RouterConfig.from_dict({"kind": ["own_file"]})
assert "own_file" not in sys.modules
"""
    script(folder / "out", code, L2R_IMPORT="named").succeed()
    script(folder / "none", code.replace('"named", ', ""), L2R_IMPORT="").succeed()
