"""Settings of a benchmark and what they may be; read without torch, before anything is timed."""

import math
from dataclasses import dataclass
from typing import Any

from l2r.errors import InputError

CLOCKS = ("wall", "cpu")


@dataclass(frozen=True)
class BenchSettings:
    """device: cpu or cuda. seconds: for one group of contenders. quick: small shapes, for tests.

    compiled: also time torch.compile of the plain code, which costs tens of seconds.
    clock: wall, or cpu for processor time (steady on a busy machine, meant for one thread).
    """

    device: str = "cpu"
    seconds: float = 4.0
    quick: bool = False
    compiled: bool = False
    clock: str = "wall"

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise InputError(f"device must be cpu or cuda; got device={self.device!r}")
        if self.clock not in CLOCKS:
            raise InputError(f"clock must be wall or cpu; got clock={self.clock!r}")
        if not 0 < self.seconds < math.inf:
            raise InputError(f"seconds must be > 0 and finite; got seconds={self.seconds}")

    @property
    def dtype(self) -> Any:
        """Torch's dtype of the models: bf16 on a GPU, else fp32."""
        import torch

        return torch.bfloat16 if self.device == "cuda" else torch.float32
