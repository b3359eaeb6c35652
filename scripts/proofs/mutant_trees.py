"""A copy of the checkout in which a change is tried, and its tests in a fork of this process."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# Plugins are imported before pytest could rewrite their assertions: they have none that matter.
PYTEST = ("-x", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")


class Outcome(NamedTuple):
    """code: exit code of pytest, 124 after the limit. failed: name of the first test that failed,
    or of the file that could not be collected; empty where none did.
    """

    code: int
    failed: str


def copy_tree(tree: Path) -> None:
    """Copy the tracked files, without their history."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.split(b"\0")
    for name in filter(None, names):
        source, target = ROOT / os.fsdecode(name), tree / os.fsdecode(name)
        if source.is_file() and not (
            target.is_file() and target.read_bytes() == source.read_bytes()
        ):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())


def run_tests(tree: Path, arguments: Sequence[str], seconds: float) -> Outcome:
    """Run tests of a tree in a fork, until the first failure or the limit."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree / "src")
        import sys

        sys.path[:0] = [str(tree / "src"), str(tree)]
        sys.dont_write_bytecode = True
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        import pytest

        class Failures:
            def pytest_runtest_logreport(self, report: Any) -> None:
                self._note(report)

            def pytest_collectreport(self, report: Any) -> None:
                self._note(report)

            def _note(self, report: Any) -> None:
                if report.failed:
                    os.write(write, f"{report.nodeid}\n".encode()[:4000])

        code = 1
        try:
            code = pytest.main([*PYTEST, *arguments], plugins=[Failures()])
        finally:
            os._exit(int(code))
    os.close(write)
    end, code = time.monotonic() + seconds, 124
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.05)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.set_blocking(read, False)
    with os.fdopen(read, "rb") as pipe:
        failed = (pipe.read() or b"").decode(errors="replace").partition("\n")[0]
    return Outcome(code, failed)
