"""Compare the C++ router, built for other processors, with plain code in float64.

    python scripts/proofs/other_processors.py

Builds for AArch64, run by qemu, and for x86-64 with 128-bit, 256-bit and, where this processor has
them, 512-bit vectors. Needs g++, aarch64-linux-gnu-g++ and qemu-aarch64 (Debian:
g++-aarch64-linux-gnu, qemu-user). Exit code 1 where a result is off.
"""

import itertools
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from l2r.functional.scoring import ScoreConstants
from l2r.kernels import plain
from l2r.kernels.contract import SCORINGS
from l2r.kernels.native.build import _FLAGS

HERE = Path(__file__)
NATIVE = HERE.parents[2] / "src" / "l2r" / "kernels" / "native"
PROCESSORS = {  # name: compiler, -march, what runs it
    "AArch64": ("aarch64-linux-gnu-g++", "armv8-a", ["qemu-aarch64"]),
    "x86-64, 128 bits": ("g++", "x86-64", []),
    "x86-64, 256 bits": ("g++", "x86-64-v3", []),
    "x86-64, 512 bits": ("g++", "x86-64-v4", []),
}
SCORE = ScoreConstants("sips", gamma=2.0)
TOLERANCE = 2e-5  # of the largest number of a result: sums of up to 300 products in fp32
BF16 = 2.0**-8


class Case(NamedTuple):
    """Sizes, and whether hidden states are bf16."""

    tokens: int
    hidden: int
    rank: int
    experts: int
    heads: int
    top_k: int
    bf16: bool

    def tensors(self) -> list[Tensor]:
        """x, W_q, gain, anchors, and gradients of logits and weights."""
        t, d, r, n, h, k, _ = self
        draw = torch.Generator().manual_seed(sum(self))
        shapes = ((t, d), (r, d), (d,), (n, h, r), (t, n), (t, k))
        x, *others = (torch.randn(shape, generator=draw) for shape in shapes)
        others[0] /= d**0.5
        return [x.bfloat16() if self.bf16 else x, *others]


CASES = [
    Case(tokens, hidden, *sizes, bf16)
    for tokens, hidden, sizes, bf16 in itertools.product(
        (1, 5, 30, 60),
        (64, 150),
        ((2, 20, 3, 4), (8, 64, 1, 8), (12, 40, 2, 4), (33, 70, 1, 8), (5, 300, 1, 16)),
        (False, True),
    )
]


def packed(case: Case) -> bytes:
    """The case as other_processors.cpp reads it."""
    scoring, *constants = SCORE
    parts = [struct.pack("7q", *case), struct.pack("i6f", SCORINGS[scoring], *constants)]
    flat = [each.view(torch.uint8).numpy().tobytes() for each in case.tensors()]
    return b"".join([*parts, *flat])


def expected(case: Case) -> list[Tensor]:
    """Results of the case in float64, in the order of other_processors.cpp."""
    tensors = [each.double() for each in case.tensors()]
    x, weight, gain, anchors = (each.requires_grad_() for each in tensors[:4])
    logits, weights, indices = plain.route(
        x, (weight, gain, anchors), SCORE, top_k=case.top_k, normalize=False
    )
    grad_weight, grad_gain, grad_anchors, grad_x = torch.autograd.grad(
        (logits * tensors[4]).sum() + (weights * tensors[5]).sum(), (weight, gain, anchors, x)
    )
    return [logits, weights, grad_weight, grad_gain, grad_anchors, indices, grad_x]


def faults(output: bytearray) -> list[str]:
    """List the results that differ from float64 by more than their limit."""
    found, start = [], 0
    names = ("logits", "weights", "grad W_q", "grad gain", "grad anchors", "indices", "grad x")
    for case in CASES:
        for name, right in zip(names, expected(case), strict=True):
            half = name == "grad x" and case.bf16
            dtype = torch.int64 if name == "indices" else torch.bfloat16 if half else torch.float32
            own = torch.frombuffer(output, dtype=dtype, count=right.numel(), offset=start)
            start += own.nbytes
            limit = TOLERANCE + BF16 * half
            error = (own.double() - right.detach().flatten()).abs().max() / right.abs().max()
            if not error <= (0 if name == "indices" else limit):
                found.append(f"{name}, {case}: {error:.1e}")
    if start != len(output):
        found.append(f"{len(output) - start} bytes more than expected")
    return found


def main() -> int:
    """Build and run each, print a line each."""
    facts = Path("/proc/cpuinfo")
    known = facts.read_text(encoding="utf-8") if facts.exists() else ""
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "cases"
        given.write_bytes(b"".join(map(packed, CASES)))
        for name, (compiler, march, runner) in PROCESSORS.items():
            missing = [each for each in (compiler, *runner) if shutil.which(each) is None]
            if missing or (march == "x86-64-v4" and "avx512vl" not in known):
                print(f"{name}: not run, {', '.join(missing) or 'not this processor'}")
                continue
            program, results = Path(folder) / "program", Path(folder) / "results"
            flags = [f for f in _FLAGS if not f.startswith(("-march", "-mprefer"))]
            source = HERE.with_suffix(".cpp")
            build: list[str | Path] = [
                compiler,
                "-std=c++17",
                *flags,
                f"-march={march}",
                "-static",
                "-I",
                NATIVE,
            ]
            subprocess.run([*build, source, "-o", program], check=True, stderr=subprocess.DEVNULL)
            subprocess.run([*runner, program, given, results], check=True)
            found = faults(bytearray(results.read_bytes()))
            failed = failed or bool(found)
            print(f"{name}: {len(CASES)} cases, {len(found)} faults", *found[:9], sep="\n  ")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
