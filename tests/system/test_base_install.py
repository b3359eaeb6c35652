"""The package without its extras, beside another transformers, and on other systems than Linux."""

import subprocess
import sys
from importlib import metadata

import pytest

pytestmark = pytest.mark.slow("fresh processes")

BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in {names!r} or name.split(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run(script, *blocked, cwd=None):
    """What a new process prints that cannot import some modules."""
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(names=blocked) + script],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr[-2500:]
    return done.stdout


USES = """
import importlib, inspect, pydoc
import l2r
from l2r import *

listed = {name for name, _ in inspect.getmembers(l2r)}
assert hasattr(l2r, "swap_routers") and set(l2r.__all__) <= listed
assert "swap_routers" in pydoc.render_doc(l2r, renderer=pydoc.plaintext)
build_router("l2r_sips", hidden_size=8, num_experts=4, top_k=2)

def name_of(package, name):
    return lambda: getattr(importlib.import_module(package), name)

for call in (
    lambda: l2r.swap_routers(None),
    lambda: l2r.load_pretrained("x"),
    lambda: l2r.fit_routers(None, None),
    lambda: l2r.L2rOlmoeConfig(),
    lambda: l2r.L2rOlmoeConfig.from_dict({}),
    name_of("l2r.hf.swap", "swap_routers"),
    name_of("l2r.hf.models", "L2rOlmoeModel"),
    name_of("l2r.hf.checkpoints", "save_model"),
):
    try:
        call()
    except ImportError as error:
        print(error)
"""


INSTALLED = metadata.version("transformers")


@pytest.mark.parametrize(
    ("blocked", "found"),
    [("transformers", "none is installed"), ("transformers.conversion_mapping", INSTALLED)],
    ids=["no transformers", "another transformers"],
)
def test_library_calls_name_the_extra_and_the_versions(blocked, found):
    lines = run(USES, blocked).splitlines()
    assert len(lines) == 8
    for line in lines:
        assert "needs transformers>=5.19; " in line and found in line, line
        assert line.endswith("pip install 'l2r-moe[lm]'"), line


ANOTHER = """
from importlib import metadata

installed = metadata.version
metadata.version = lambda name: {found!r} if name == "transformers" else installed(name)
"""


def test_an_older_transformers_is_refused_and_a_newer_one_gets_one_warning():
    old = "transformers must be 5.19 or newer; got 5.18.2: pip install -U 'l2r-moe[lm]'"
    assert run(ANOTHER.format(found="5.18.2") + USES).splitlines() == [old] * 8
    use = "import l2r; l2r.load_pretrained, l2r.swap_routers; import l2r.engines.serve.server"
    done = subprocess.run(
        [sys.executable, "-c", ANOTHER.format(found="5.99") + use],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and done.stderr.count("transformers 5.99 is newer") == 1


# Everything is imported once, so that other packages have read the real platform; then ours again.
ELSEWHERE = """
import ctypes, os, pathlib, platform
import l2r.cli.app, l2r.cli.doctor
import l2r_lab.training.evaluation.whole_checkpoint, l2r_lab.training.loop
import torch

def on(system):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("l2r", "l2r_lab")]:
        del sys.modules[name]
    sys.platform = system
    import l2r, l2r.cli.app, l2r_lab.training.evaluation.whole_checkpoint
    from l2r.cli.doctor import run_checks
    from l2r.kernels.native.build import library
    from l2r_lab.training.recipes.load import load_recipe
    from l2r_lab.training import loop

    assert library() is None
    router = l2r.build_router("l2r_sips", hidden_size=8, num_experts=4, top_k=2)
    router(torch.randn(3, 8)).logits.sum().backward()
    recipe = load_recipe("demo/l2r-sips", {changes!r})
    loop.train(recipe, pathlib.Path(system), show_progress=False)
    print([check.detail for check in run_checks() if check.name == "CPU kernel"])

class Library(ctypes.CDLL):
    def __init__(self, name, *args, **kwargs):
        if name is None:
            raise TypeError("LoadLibrary() argument 1 must be str, not None")
        super().__init__(name, *args, **kwargs)

class Locking:
    LK_NBLCK = 2

    @staticmethod
    def locking(descriptor, mode, count):
        taken.append(mode)

on("darwin")
names = "uname", "getuid", "geteuid", "sched_getaffinity", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"
for name in names:
    delattr(os, name)
ctypes.CDLL, taken = Library, []
sys.modules |= {{"fcntl": None, "msvcrt": Locking}}
on("win32")
assert set(taken) == {{Locking.LK_NBLCK}}
"""


def test_what_linux_alone_has_is_not_needed(tmp_path, tiny_changes):
    changes = [*tiny_changes, "training.steps=1"]
    printed = run(ELSEWHERE.format(changes=changes), cwd=tmp_path)
    for system in ("darwin", "win32"):
        assert f"compiled on Linux only, not on {system}" in printed
        assert (tmp_path / system / "metrics.jsonl").is_file()
