"""Run pytest on one file, read its report, write the tables."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

_INTRODUCTION = """\
# Other projects' own tests

Written by `make peers`. The first table runs transformers' own test classes against its models
and, in the same way, against ours; a model of ours must pass every test that its stock sibling
passes, and one that it fails or skips is named in the last column. The classes are those of the
source distribution of transformers {version}: common model tests (saving, loading, dtypes,
initialization, attention kernels, checkpointing, outputs), training, tensor parallel and expert
parallel, the last two with two processes.

Three tests ask first whether they apply, and ours is made to answer as stock does: whether a
decorator is in the source of the model (of the experts, which ours takes from stock), and twice
whether tensors had other names before (those of our ViT never had; it is given stock's).

Not run: transformers' generation and export tests. Its source distribution leaves
`tests/generation` and `tests/exporters` out; our own tests cover both (generation with and
without the cache, `torch.export`).
"""
_ENGINES = """\
The second table compares our losses and selection rules with the engines' own code on a CPU. The
packages on the index hold no tests of their routers, so their functions are called with the same
numbers as ours: `scripts/others/peers/engine_checks.py`.
"""


@dataclass
class Outcome:
    """Names of tests by what became of them."""

    passed: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)

    @property
    def run(self) -> int:
        return len(self.passed) + len(self.failed) + len(self.skipped)

    def behind(self, stock: "Outcome") -> list[str]:
        """Tests that pass there and do not pass here: failed, skipped or not there at all."""
        return sorted(stock.passed - self.passed)


def run_class(file: Path, name: str, *, report: Path, path: Sequence[Path], cwd: Path) -> Outcome:
    """Run one test class of a file in a process of its own, with ``path`` to import from."""
    report.unlink(missing_ok=True)
    here = Path(__file__).resolve().parents[3] / "src"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [here, *path])),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "pytest", f"{file}::{name}", "--import-mode=importlib", "-q"]
    command += ["-c", os.devnull, "--rootdir", str(file.parent), "-p", "no:cacheprovider"]
    command += ["-W", "ignore", "--tb=short", f"--junitxml={report}"]
    subprocess.run(command, cwd=cwd, env=environment, check=False)
    if not report.is_file():
        raise SystemExit(f"error: pytest wrote no report for {name}; see its output above")
    return _read(report)


def _read(report: Path) -> Outcome:
    """Outcome of every test in a JUnit report; a test with a failed subtest failed."""
    outcome = Outcome()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = str(case.get("name"))
        tags = {child.tag for child in case}
        if tags & {"failure", "error"}:
            outcome.failed.add(name)
        elif "skipped" in tags:
            outcome.skipped.add(name)
        else:
            outcome.passed.add(name)
    outcome.passed -= outcome.failed
    outcome.skipped -= outcome.failed
    return outcome


def markdown(
    suites: Mapping[str, Outcome],
    stock: Mapping[str, str | None],
    engines: Mapping[str, Outcome | str],
    version: str,
) -> str:
    """Both tables, with the names of the tests that only the stock model passes."""
    lines = [_INTRODUCTION.format(version=version)]
    lines += ["| model | run | passed | failed | skipped | not passed where stock passes |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for name, outcome in suites.items():
        sibling = suites.get(stock[name] or "")
        behind = "" if sibling is None else ", ".join(outcome.behind(sibling)) or "none"
        lines.append(f"| {name} | {_counts(outcome)} | {behind} |")
    if engines:
        lines += ["", _ENGINES, "| engine | run | passed | failed | skipped |"]
        lines += ["| --- | --- | --- | --- | --- |"]
    for name, found in engines.items():
        counts = found if isinstance(found, str) else _counts(found)
        lines.append(f"| {name} | {counts} |" + ("" if "|" in counts else " | | |"))
    return "\n".join(lines) + "\n"


def _counts(outcome: Outcome) -> str:
    counts = (outcome.run, *map(len, (outcome.passed, outcome.failed, outcome.skipped)))
    return " | ".join(map(str, counts))
