"""Run pytest on one file, read its report, write the tables."""

import os
import subprocess
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

_INTRODUCTION = """\
# Other projects' own tests

Written by `make peers`. The first table runs transformers' own test classes against its models
and, in the same way, against ours; a model of ours must pass every test that its stock sibling
passes, and fail none that its sibling skips; the last column names what is otherwise. Stock models
run in a process that does not import l2r. The classes are those of the source distribution of
transformers {version}: common model tests (saving, loading, dtypes, initialization, attention
kernels, checkpointing, outputs), configurations and training; for OLMoE also tensor parallel and
expert parallel, with two processes.

- StockOlmoe, L2rOlmoe, L2rOlmoeLinear, StockViT, L2rViT: our own models, and those they are made
  from.
- Stock_FAMILY, Swapped_FAMILY: a family's model, and the class of one whose routers are swapped.
- Recorded_FAMILY: the stock model; each that a test makes or loads is inside `record`.
- Replayed_FAMILY: the stock model; each call takes, inside `replay`, the experts that the same call
  took just before.
- Captured_FAMILY: the swapped model; each is inside `capture`.
- Observed_FAMILY: the stock model; each is inside `capture`.

A family stands for each rule by which routers select (`src/l2r/hf/swap/rules.py`) and of which
transformers has a causal language model: `scripts/others/peers/cases.py`. Those of three families
run in `make test-slow`.

Tests that ask first whether they apply are answered as stock does: whether a decorator is in the
source of the model (its experts are stock's), and twice whether tensors had other names before
(those of our ViT never had; it is given stock's).

Not in the source distribution, so not run, and what covers it here:

- `tests/generation`: `tests/hf/family_check.py` (with and without the cache), `tests/hf/routes`
  (padding, static caches, drafts), `tests/engines/serve`.
- `tests/exporters`: `tests/hf/checkpoints/test_programs.py` (torch.export, ONNX).
- `tests/models/FAMILY`: `tests/hf` and `tests/system/test_cells.py`, every family.
- The helper of `test_fsdp_mixin.py`: `tests/system/test_ranks.py` and `test_router_ranks.py`.
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
    seconds: float = 0.0

    @property
    def run(self) -> int:
        return len(self.passed) + len(self.failed) + len(self.skipped)

    def behind(self, stock: "Outcome") -> list[str]:
        """Tests that pass there and not here, and those that fail here and do not fail there."""
        return sorted((stock.passed - self.passed) | (self.failed - stock.failed))


def faults(outcome: Outcome, stock: Outcome, excluded: Container[str]) -> list[str]:
    """Tests in which stock is ahead and which are not excluded, and excluded ones that pass."""
    behind = [name for name in outcome.behind(stock) if name not in excluded]
    return behind + [f"{name} (excluded)" for name in outcome.passed if name in excluded]


def run_class(
    file: Path,
    name: str,
    *,
    report: Path,
    path: Sequence[Path],
    cwd: Path,
    without: Sequence[str] = (),
) -> Outcome:
    """Run one test class of a file in a process of its own, with ``path`` to import from.

    ``without`` are names of tests that are not run.
    """
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
    command += ["--disable-warnings", "--tb=short", f"--junitxml={report}"]
    command += [f"--deselect={file.name}::{name}::{test}" for test in without]
    subprocess.run(command, cwd=cwd, env=environment, check=False)
    if not report.is_file():
        raise SystemExit(f"error: pytest wrote no report for {name}; see its output above")
    return read_report(report)


def read_report(report: Path) -> Outcome:
    """Outcome of every test in a JUnit report; a test with a failed subtest failed."""
    outcome, root = Outcome(), ElementTree.parse(report).getroot()
    outcome.seconds = sum(float(each.get("time", 0)) for each in root.iter("testsuite"))
    for case in root.iter("testcase"):
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
    excluded: Callable[[str], Mapping[str, str]] = lambda subject: {},
) -> str:
    """Both tables, with the names of the tests in which a model is behind its stock sibling."""
    lines = [_INTRODUCTION.format(version=version)]
    head = "model | run | passed | failed | skipped | excluded | seconds"
    lines += [f"| {head} | behind stock |", "| --- " * 8 + "|"]
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, outcome in suites.items():
        sibling, left_out = suites.get(stock[name] or ""), excluded(name)
        found = "" if sibling is None else ", ".join(faults(outcome, sibling, left_out)) or "none"
        counts = f"{_counts(outcome)} | {len(left_out)} | {outcome.seconds:.0f}"
        lines.append(f"| {name} | {counts} | {found} |")
        for test, reason in left_out.items():
            reasons.setdefault((test, reason), []).append(name)
    notes = [
        f"- Excluded: `{test}` of {', '.join(names)}: {reason}."
        for (test, reason), names in reasons.items()
    ]
    missing = [name for name in stock if name not in suites]
    if missing:
        notes.append(f"- Not run this time: {', '.join(missing)}.")
    lines += ["", *notes] if notes else []
    if engines:
        lines += ["", _ENGINES, "| engine | run | passed | failed | skipped |"]
        lines += ["| --- | --- | --- | --- | --- |"]
    for name, found_there in engines.items():
        counts = found_there if isinstance(found_there, str) else _counts(found_there)
        lines.append(f"| {name} | {counts} |" + ("" if "|" in counts else " | | |"))
    return "\n".join(lines) + "\n"


def _counts(outcome: Outcome) -> str:
    counts = (outcome.run, *map(len, (outcome.passed, outcome.failed, outcome.skipped)))
    return " | ".join(map(str, counts))
