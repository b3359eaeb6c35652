"""``l2r doctor``: what works on this machine, what runs instead of what does not."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import typer

from l2r.cli.options import AsJson
from l2r.report.tables import Table

# OK; works in a slower or smaller form; optional and not there; broken, so exit code 1.
OK, FALLBACK, MISSING, FAILED = "ok", "fallback", "missing", "failed"


@dataclass(frozen=True)
class CheckResult:
    """Outcome of one check: status is ok, fallback, missing (optional) or failed."""

    name: str
    status: str
    detail: str


def doctor(
    as_json: AsJson = False,
) -> None:
    """Check this machine: kernels against plain code, compiler, threads, disk, extras.

    Exit code 1 when a check failed.

    Example: l2r doctor --json
    """
    from l2r.cli.console import print_table

    checks = run_checks()
    rows = tuple((c.name, c.status, c.detail) for c in checks)
    caption = "fallback: works, in the form named. missing: optional. failed: exit code 1."
    count = {status: sum(c.status == status for c in checks) for status in (FAILED, FALLBACK)}
    verdict = (
        f"{count[FAILED]} of {len(checks)} checks failed; {count[FALLBACK]} run in another form."
    )
    columns = ("check", "status", "detail")
    table = Table("l2r doctor", columns, rows, caption=caption, verdict=verdict)
    print_table(table, as_json=as_json)
    if any(check.status == FAILED for check in checks):
        raise typer.Exit(1)


def run_checks() -> list[CheckResult]:
    """Every check, needed ones first."""
    needed: dict[str, Callable[[], tuple[str, str]]] = {
        "torch": _torch,
        "threads": _threads,
        "grouped_mm": _grouped_mm,
        "compiler": _compiler,
        "CPU kernel": _cpu_kernel,
        "GPU kernel": _gpu_kernel,
        "cache folder": _cache_folder,
        "disk": _disk,
    }
    return [*(_check(name, function) for name, function in needed.items()), *_extras()]


def _check(name: str, function: Callable[[], tuple[str, str]]) -> CheckResult:
    try:
        return CheckResult(name, *function())
    except Exception as error:  # a check must report whatever goes wrong, and the next one run
        return CheckResult(name, FAILED, f"{type(error).__name__}: {error}".splitlines()[0])


def _torch() -> tuple[str, str]:
    import torch

    return OK, f"torch {torch.__version__}"


def _threads() -> tuple[str, str]:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads, cores = torch.get_num_threads(), usable or 1
    if threads > cores:
        return FALLBACK, f"{threads} threads on {cores} cores are slow; set OMP_NUM_THREADS={cores}"
    return OK, f"{threads} of torch, {cores} usable cores"


def _grouped_mm() -> tuple[str, str]:
    import torch

    from l2r.moe.grouped import grouped_linear

    x, weight = torch.randn(6, 16), torch.randn(3, 8, 16)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    expected = torch.cat([x[:2] @ weight[0].T, x[2:] @ weight[2].T])
    error = (grouped_linear(x, weight, ends) - expected).abs().max().item()
    if error > 1e-4:
        return FAILED, f"grouped_mm differs from a loop by {error:.1e}"
    return OK, f"fp32, an empty group; largest difference from a loop {error:.0e}"


def _compiler() -> tuple[str, str]:
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        return MISSING, f"no {name}; install g++ or set CXX to a C++ compiler with OpenMP"
    process = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    return OK, process.stdout.splitlines()[0]


def _cpu_kernel() -> tuple[str, str]:
    from l2r.kernels.native.build import library, on_linux

    status, detail = _agreement("cpu", "cpu")
    if status == OK and library() is None:
        asked = os.environ.get("L2R_CPU_KERNEL")
        why = "L2R_CPU_KERNEL=off" if asked == "off" else "it could not be built"
        if asked is None and not on_linux():
            why = f"compiled on Linux only, not on {sys.platform} (L2R_CPU_KERNEL=on tries)"
        return FALLBACK, f"{why}: blocked torch code runs instead, slower; {detail}"
    return status, f"compiled; {detail}"


def _gpu_kernel() -> tuple[str, str]:
    import torch

    if not torch.cuda.is_available():
        return MISSING, "no GPU; everything runs on the CPU"
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {memory:.0f} GiB"
    from l2r.kernels.dispatch import has_triton

    if not has_triton():
        return FALLBACK, f"{machine}; no Triton: plain torch code runs; pip install 'l2r-moe[gpu]'"
    status, detail = _agreement("cuda", "triton")
    from l2r.kernels.guard import verdicts

    outcomes = list(verdicts.values())  # of the calls above
    refused = [verdict.reason for verdict in outcomes if verdict.reason]
    if refused and status == OK:
        return FALLBACK, f"{machine}; the guard refused the kernels, torch code runs: {refused[0]}"
    worst = max((verdict.error for verdict in outcomes), default=0.0)
    guard = f"guard: {worst:.0e} of its limit" if worst else "guard off (L2R_GUARD)"
    return status, f"{machine}; {detail}; {guard}"


def _agreement(device: str, kernel: str) -> tuple[str, str]:
    """Compare a kernel's results and gradients with those of plain code in float64.

    Rank 2 and rank 16 take different ways through the CPU backend.
    """
    import torch

    from l2r.functional.scoring import ScoreConstants
    from l2r.kernels.contract import Options, Tensors
    from l2r.kernels.guard import compare
    from l2r.kernels.operation import backend

    errors = []
    for rank in (2, 16):
        sizes = {"x": (1, 64), "weight": (rank, 64), "gain": (64,), "anchors": (16, 16, rank)}
        like = Tensors(**{name: torch.empty(size, device=device) for name, size in sizes.items()})
        errors.append(
            compare(backend(kernel), like, Options(ScoreConstants("sips"), top_k=4)).error
        )
    error = max(errors) * torch.finfo(torch.float32).eps ** 0.5  # of the largest exact number
    if max(errors) > 1:
        return FAILED, f"forward and backward differ from plain code by {error:.1e} of the largest"
    return OK, f"forward and backward within {error:.0e} of plain code"


def _cache_folder() -> tuple[str, str]:
    from l2r.files.cache import cache_folder

    root = cache_folder()
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=root):
        return OK, f"{root} is writable (L2R_CACHE), {_free(root)}"


def _disk() -> tuple[str, str]:
    here = Path.cwd()
    if not os.access(here, os.W_OK):
        return FALLBACK, f"{here} is not writable; give --out where a command writes"
    return OK, f"{here} is writable, {_free(here)}"


def _free(folder: Path) -> str:
    return f"{shutil.disk_usage(folder).free / 2**30:.0f} GiB free"


def _extras() -> list[CheckResult]:
    from packaging.requirements import Requirement

    from l2r.cli.extras import ALONE, FOR_DEVELOPMENT, PACKAGE, extras, missing

    optional = {e: needs for e, needs in extras().items() if e not in FOR_DEVELOPMENT}
    if not optional:
        return [
            CheckResult(
                "extras", MISSING, f"{PACKAGE} is not installed as a package: pip install -e ."
            )
        ]
    checks = []
    for extra, needs in optional.items():
        lacking = missing(needs)
        names = ", ".join(need.name for need in needs)
        if lacking:
            detail = f"pip install '{PACKAGE}[{extra}]' for {', '.join(lacking)}"
            checks.append(CheckResult(f"extra {extra}", MISSING, detail))
        else:
            checks.append(
                CheckResult(f"extra {extra}", OK, names or "nothing needed on this platform")
            )
    for package, install in ALONE.items():
        lacking = missing([Requirement(package)])
        detail = f"pip install {install}" if lacking else "installed"
        checks.append(CheckResult(package, MISSING if lacking else OK, detail))
    return checks
