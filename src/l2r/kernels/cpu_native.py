"""The compiled form of the CPU backend: builds ``cpu_kernel.cpp`` once and calls it.

The library is built on first use where a C++ compiler is found (one to two seconds, said on the
log) and kept in ``$L2R_CACHE``, by default ``~/.cache/l2r``, under a name made of the source,
the flags, the compiler and the processor. Without a compiler, or with ``L2R_CPU_KERNEL=off``, the
torch code of ``cpu`` runs instead; the results agree to a few units of fp32 rounding.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from l2r.kernels.backend import Score, Selected

MAX_RANK = 8  # above, the projection of torch is faster
MAX_ANCHOR_NUMBERS = 2**18  # N H R up to which a gradient per thread stays in the caches

_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp")
_SOURCE = Path(__file__).with_name("cpu_kernel.cpp")
_SCORINGS = {"dot": 0, "cosine": 1, "sips": 2}
_log = logging.getLogger("l2r")


class _Score(ctypes.Structure):
    _fields_ = [("scoring", ctypes.c_int32)] + [
        (name, ctypes.c_float) for name in ("gamma", "beta", "p", "eps", "scale", "norm_eps")
    ]


_NUMBER, _POINTER = ctypes.c_int32, ctypes.c_void_p
_TYPES = {
    "l2r_forward": [_POINTER, _POINTER, _NUMBER, _NUMBER, *[_POINTER] * 11],
    "l2r_score_backward": [_POINTER, _POINTER, _NUMBER, *[_POINTER] * 6],
    "l2r_project_backward": [_POINTER, _NUMBER, *[_POINTER] * 7],
}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, built if needed; None where they cannot or must not be used."""
    if os.environ.get("L2R_CPU_KERNEL", "on") == "off":
        return None
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        _log.info("no C++ compiler found; routers use torch operations on the CPU")
        return None
    try:
        return ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        _log.warning("the CPU router kernel could not be built, torch code runs: %s", reason)
        return None


def _build(compiler: str) -> Path:
    """Path of the library; compiled under a temporary name and renamed."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    parts = [_SOURCE.read_bytes(), " ".join(_FLAGS).encode(), version, _processor()]
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder = Path(os.environ.get("L2R_CACHE", Path.home() / ".cache" / "l2r"))
    path = folder / f"cpu-kernel-{digest}.so"
    if path.exists():
        return path
    _log.warning("compiling the CPU router kernel, once, into %s", path)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as room:
        fresh = Path(room) / "kernel.so"
        subprocess.run(
            [compiler, "-std=c++17", *_FLAGS, "-fPIC", "-shared", str(_SOURCE), "-o", str(fresh)],
            capture_output=True,
            check=True,
            text=True,
        )
        fresh.replace(path)
    return path


def _processor() -> bytes:
    """What -march=native depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_bytes().splitlines() if info.exists() else [os.uname().machine.encode()]
    return b"\n".join(sorted({line for line in lines if line.startswith((b"model", b"flags"))}))


def forward(
    query: Tensor,
    x: Tensor | None,
    weight: Tensor,
    gain: Tensor | None,
    anchors: Tensor,
    *,
    constants: Score,
    norm_eps: float,
    top_k: int,
    normalize: bool,
    sums: bool,
) -> tuple[Tensor, Tensor, Selected]:
    """1 / rms, logits and the selection (empty for top_k 0); fills ``query`` unless x is None."""
    tokens, rank = query.shape
    experts, heads, _ = anchors.shape
    threads = _threads(tokens, experts * heads)
    rstd = query.new_empty(0 if x is None or gain is None else tokens)
    logits = query.new_empty(tokens, experts)
    selected = Selected(
        query.new_empty(tokens, top_k),
        query.new_empty(tokens, top_k, dtype=torch.int64),
        query.new_empty(tokens),
        query.new_zeros(threads if sums else 0, 2, experts),
    )
    _call(
        "l2r_forward",
        _sizes(tokens, weight.shape[1], rank, experts, heads, top_k),
        _score(constants, norm_eps),
        threads,
        int(normalize),
        x,
        weight,
        gain,
        anchors,
        query,
        rstd,
        logits,
        selected.weights if top_k else None,
        selected.indices,
        selected.lse,
        selected.sums if sums else None,
    )
    return rstd, logits, selected._replace(sums=selected.sums.sum(0)) if sums else selected


def score_backward(
    query: Tensor, anchors: Tensor, logits: Tensor, grad: Tensor, constants: Score
) -> tuple[Tensor, Tensor]:
    """Gradients of a [T, R] and b [R, H, N]."""
    tokens, rank = query.shape
    experts, heads, _ = anchors.shape
    threads = _threads(tokens, experts * heads)
    grad_a = torch.empty_like(query)
    grad_b = query.new_zeros(threads, rank, heads, experts)
    _call(
        "l2r_score_backward",
        _sizes(tokens, 0, rank, experts, heads, 0),
        _score(constants, 0.0),
        threads,
        query,
        anchors,
        logits,
        grad,
        grad_a,
        grad_b,
    )
    return grad_a, grad_b.sum(0)


def project_backward(
    x: Tensor,
    weight: Tensor,
    gain: Tensor | None,
    grad: Tensor,
    pull: Tensor | None,
    grad_x: Tensor | None,
) -> Tensor:
    """Gradient of the folded projection [R, D]; fills ``grad_x``."""
    tokens, hidden = x.shape
    threads = _threads(tokens, hidden)
    grad_folded = x.new_zeros(threads, *weight.shape)
    _call(
        "l2r_project_backward",
        _sizes(tokens, hidden, weight.shape[0], 0, 0, 0),
        threads,
        x,
        weight,
        gain,
        grad,
        pull,
        grad_x,
        grad_folded,
    )
    return grad_folded.sum(0)


def _call(name: str, *arguments: object) -> None:
    found = library()
    assert found is not None
    function = getattr(found, name)
    function.argtypes = _TYPES[name]
    function(*[v.data_ptr() if isinstance(v, Tensor) else v for v in arguments])


@lru_cache(maxsize=256)
def _sizes(*values: int) -> object:
    return (ctypes.c_int64 * 6)(*values)


@lru_cache(maxsize=256)
def _score(constants: Score, norm_eps: float) -> object:
    scoring, *floats = constants
    return ctypes.byref(_Score(_SCORINGS[scoring], *floats, norm_eps))


def _threads(tokens: int, work: int) -> int:
    """Threads worth starting: one for every 2**15 numbers."""
    return max(1, min(torch.get_num_threads(), tokens * work // 2**15))
