"""The compiled form of the CPU backend: builds ``cpu_forward.cpp`` and ``cpu_backward.cpp`` once.

The library is built on first use where a C++ compiler is found (one to two seconds, said on the
log) and kept in ``$L2R_CACHE``, by default ``~/.cache/l2r``, under a name made of the source,
the flags, the compiler and the processor. Without a compiler, or with ``L2R_CPU_KERNEL=off``, the
torch code of ``cpu`` runs instead; the results agree to a few units of fp32 rounding.
``L2R_CPU_MARCH`` builds for another processor than this one (x86-64-v3: AVX2 without AVX-512).
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from l2r.kernels.backend import Score, Upstream

_FLAGS: tuple[str, ...] = (
    "-O3",
    f"-march={os.environ.get('L2R_CPU_MARCH', 'native')}",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fopenmp",
)
if platform.machine() in ("x86_64", "AMD64"):
    _FLAGS += ("-mprefer-vector-width=512",)  # compilers choose 256 by default; 0.87 of the time
_FOLDER = Path(__file__).parent
_SOURCES = [_FOLDER / "cpu_forward.cpp", _FOLDER / "cpu_backward.cpp"]
_HEADER = _FOLDER / "cpu_common.h"
_SCORINGS = {"dot": 0, "cosine": 1, "sips": 2}
NO_SCORE = Score("dot", 1.0, 1.0, 1.0, 1.0, 1.0)  # where no stage scores
_log = logging.getLogger("l2r")


class Grads(NamedTuple):
    """Gradients of logits, query, x, W_q, gain and anchors; None where not computed."""

    logits: Tensor | None = None
    query: Tensor | None = None
    x: Tensor | None = None
    weight: Tensor | None = None
    gain: Tensor | None = None
    anchors: Tensor | None = None


class _Score(ctypes.Structure):
    _fields_ = [("scoring", ctypes.c_int32)] + [
        (name, ctypes.c_float) for name in ("gamma", "beta", "p", "eps", "scale", "norm_eps")
    ]


_NUMBER, _POINTER = ctypes.c_int32, ctypes.c_void_p
_TYPES = {
    "l2r_forward": [_POINTER, _POINTER, _NUMBER, _NUMBER, *[_POINTER] * 11],
    "l2r_backward": [_POINTER, _POINTER, _NUMBER, _NUMBER, *[_POINTER] * 20],
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
        found = ctypes.CDLL(str(_build(compiler)))
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        _log.warning("the CPU router kernel could not be built, torch code runs: %s", reason)
        return None
    for name, types in _TYPES.items():
        function = getattr(found, name)
        function.argtypes, function.restype = types, None
    return found


def _build(compiler: str) -> Path:
    """Path of the library; compiled under a temporary name and renamed."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    sources = [path.read_bytes() for path in (*_SOURCES, _HEADER)]
    parts = [*sources, " ".join(_FLAGS).encode(), version, _processor()]
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
            [compiler, "-std=c++17", *_FLAGS, "-fPIC", "-shared", *_SOURCES, "-o", fresh],
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


class Stages(NamedTuple):
    """Tensors of one call; None for what a stage that is left out would need.

    ``x`` None: the query is given. ``anchors`` None: the logits are, if any. ``weights`` None: no
    selection. ``query``, ``rstd`` and ``lse`` empty: not wanted.
    """

    x: Tensor | None = None
    weight: Tensor | None = None
    gain: Tensor | None = None
    anchors: Tensor | None = None
    query: Tensor | None = None
    rstd: Tensor | None = None
    logits: Tensor | None = None
    weights: Tensor | None = None
    indices: Tensor | None = None
    lse: Tensor | None = None
    sums: Tensor | None = None

    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """T, D, R, N, H and K, 0 where a stage is left out."""
        x, weight, _, anchors, _, _, logits, weights, *_ = self
        hidden = rank = experts = heads = tokens = 0
        if logits is not None:
            tokens, experts = logits.shape
        if anchors is not None:
            _, heads, rank = anchors.shape
        elif weight is not None:
            rank = weight.shape[0]
        if x is not None:
            tokens, hidden = x.shape
        return tokens, hidden, rank, experts, heads, 0 if weights is None else weights.shape[1]


def forward(
    stages: Stages,
    constants: Score = NO_SCORE,
    *,
    norm_eps: float = 0.0,
    normalize: bool = False,
    sums: bool = False,
) -> None:
    """Fill the outputs among the stages; the sums only if asked for."""
    *tensors, total = stages
    sizes = stages.sizes()
    threads = _threads(sizes)
    parts = total.new_zeros(threads, *total.shape) if sums and total is not None else None
    _run("l2r_forward", sizes, _score(constants, norm_eps), threads, normalize, *tensors, parts)
    if parts is not None:
        torch.sum(parts, 0, out=total)


def backward(
    stages: Stages,
    upstream: Upstream,
    grads: Grads,
    constants: Score = NO_SCORE,
    *,
    normalize: bool = False,
) -> None:
    """Fill ``grads`` in one pass over the tokens.

    With ``x`` alone among x and anchors, the gradient of the query is an input.
    """
    sizes, tensors = stages.sizes(), (*stages[:-1], *upstream, *grads)
    score = _score(constants, 0.0)
    _run("l2r_backward", sizes, score, _threads(sizes), normalize, *tensors)


def _run(
    name: str,
    sizes: tuple[int, ...],
    score: object,
    threads: int,
    normalize: bool,
    *tensors: Tensor | None,
) -> None:
    found = library()
    assert found is not None  # asked by the caller
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    getattr(found, name)(_sizes(sizes), score, threads, normalize, *addresses)


def _threads(sizes: tuple[int, ...]) -> int:
    """Threads worth starting: one for every 2**15 numbers."""
    tokens, hidden, _, experts, heads, _ = sizes
    work = tokens * (hidden + experts * max(1, heads))
    return 1 if work < 2**16 else min(torch.get_num_threads(), tokens, work // 2**15)


@lru_cache(maxsize=256)
def _sizes(sizes: tuple[int, ...]) -> object:
    return (ctypes.c_int64 * 6)(*sizes)


@lru_cache(maxsize=256)
def _score(constants: Score, norm_eps: float) -> object:
    scoring, *floats = constants
    return ctypes.byref(_Score(_SCORINGS[scoring], *floats, norm_eps))
