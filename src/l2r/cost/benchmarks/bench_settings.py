"""Settings of a benchmark and what they may be; read without torch, before anything is timed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from l2r.errors import InputError

CLOCKS = ("wall", "cpu")
BENCHES = ("router", "memory", "scaling", "moe", "step", "inference", "routes")


@dataclass(frozen=True)
class BenchSettings:
    """device: cpu or cuda. seconds: for one group of contenders. quick: small shapes, for tests.

    compiled: also time torch.compile of the plain code, which costs tens of seconds.
    clock: wall, or cpu for processor time (steady on a busy machine, meant for one thread).
    watch: is given percent done, 100 and what is measured now; not stored.
    """

    device: str = "cpu"
    seconds: float = 4.0
    quick: bool = False
    compiled: bool = False
    clock: str = "wall"
    watch: Callable[[int, int, str], None] | None = None

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise InputError(f"device must be cpu or cuda; got device={self.device!r}")
        if self.clock not in CLOCKS:
            raise InputError(f"clock must be wall or cpu; got clock={self.clock!r}")
        if not 0 < self.seconds < math.inf:
            raise InputError(f"seconds must be > 0 and finite; got seconds={self.seconds}")

    @property
    def dtype(self) -> Any:
        """torch's dtype of the models: bf16 on a GPU, else fp32."""
        import torch

        return torch.bfloat16 if self.device == "cuda" else torch.float32


def check_bench(name: str) -> None:
    """Raise ValueError for a name that no benchmark has."""
    if name not in BENCHES:
        raise InputError(f"benchmark must be one of {', '.join(BENCHES)}; got {name!r}")
