"""Run the fuzz of the C++ router with every address checked; ``make sanitize`` calls it.

The kernel is built with gcc's address and undefined-behavior sanitizers into a folder of its own,
the runtime of the first is loaded before Python, whose other code stays as it is. Memory of torch
and of the kernel has guard zones then, and a read or a write past either ends the process with a
report. Before that a fault is planted in a copy of the source, one number written past the end, and
must be found. Conversions of NaN to an integer are left alone: their result is not used.

    python scripts/proofs/sanitize.py --cases 1000
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FLAGS = (
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
)
TESTS = ["tests/kernels/test_calls.py", "tests/kernels/test_cpu.py", "tests/kernels/test_ties.py"]
RIGHT = "if (in.rstd) in.rstd[t] = scale;"
PLANTED = "if (in.rstd) in.rstd[t + 1] = scale;"
STEP = """
import torch
from l2r.kernels import dispatch
from l2r.functional.scoring import ScoreConstants
x, weight, gain = torch.randn(16, 8), torch.randn(2, 8), torch.randn(8, requires_grad=True)
dispatch.route_logits(x, (weight, gain, torch.randn(4, 1, 2)), ScoreConstants())
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="calls that are drawn at random")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return _child(options.child)
    preloaded = [_library("libasan.so"), _library("libstdc++.so.6")]
    if not all(path.is_absolute() for path in preloaded):
        print("error: g++ has no libasan.so; install gcc's address sanitizer", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "LD_PRELOAD": " ".join(map(str, preloaded)),
            # Python leaks on purpose; torch frees with another function than it allocates.
            "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "L2R_CACHE": cache,
            "L2R_FUZZ": str(options.cases),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        command = [sys.executable, __file__, "--child"]
        planted = subprocess.run(
            [*command, "planted"], env=environment, capture_output=True, text=True, check=False
        )
        if "heap-buffer-overflow" not in planted.stderr or "WRITE of size 4" not in planted.stderr:
            print(f"error: the planted fault was not found\n{planted.stderr}", file=sys.stderr)
            return 1
        print("a number written past the end was found", flush=True)
        start = time.perf_counter()
        tests = subprocess.run([*command, *TESTS], env=environment, cwd=ROOT, check=False)
        print(
            f"{options.cases} drawn calls and the other tests: {time.perf_counter() - start:.0f} s"
        )
    return tests.returncode and 1


def _library(name: str) -> Path:
    """A library of the compiler; what throws has to be there when the sanitizer starts."""
    command = ["g++", f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return Path(found)


def _child(wanted: list[str]) -> int:
    """One step with the planted fault, or the tests, by the sanitized kernel."""
    if wanted != ["planted"]:
        import pytest

        # Other code than the kernel, and memory that runs out on purpose.
        others = ("triton", "fullgraph", "no_score_tensor", "without_a_compiler", "memory_ran_out")
        skips = " and ".join(f"not {name}" for name in others)
        # Without capture: what the sanitizers print as they end the process must come out.
        options = ["-p", "no:cacheprovider", "-x", "--capture=no", "-k", skips]
        return int(pytest.main([*options, *wanted], plugins=[Sanitized()]))
    build = _sanitized()
    folder = Path(os.environ["L2R_CACHE"]) / "planted"
    shutil.copytree(build._FOLDER, folder)
    forward = folder / "forward.cpp"
    text = forward.read_text()
    assert text.count(RIGHT) == 1
    forward.write_text(text.replace(RIGHT, PLANTED))
    build._SOURCES = [folder / path.name for path in build._SOURCES]
    build._HEADERS = [folder / path.name for path in build._HEADERS]
    assert build.library() is not None
    exec(STEP, {})
    return 0


class Sanitized:
    """A plugin of pytest that builds the kernel with the sanitizers before tests are collected."""

    def pytest_sessionstart(self) -> None:
        assert _sanitized().library() is not None


def _sanitized() -> Any:
    from l2r.kernels.native import build

    build._FLAGS += FLAGS
    return build


if __name__ == "__main__":
    sys.exit(main())
