"""Speed of this machine: floating-point operations and bytes of memory per second."""

from dataclasses import dataclass

import torch
from torch import nn

from l2r.cost.benchmarks.timing import measure

_SIDE = 1024  # of the matrices
_WIDEST, _PRODUCT = 4096, 2**27  # sizes and multiply-adds of one product that is timed shortly
_NUMBERS = 2**24  # that are copied, more than caches hold


@dataclass(frozen=True)
class MachineSpeed:
    """Floating-point operations in fp32, and bytes read or written, per second."""

    flops: float
    bytes: float

    def limit(self, flops: float, bytes_: float) -> tuple[float, str]:
        """Least seconds for so much work, and which of the two takes them."""
        seconds = {"multiplications": flops / self.flops, "memory": bytes_ / self.bytes}
        longest = max(seconds, key=lambda name: seconds[name])
        return seconds[longest], longest


def machine_speed(device: str, *, seconds: float = 1.0, clock: str = "wall") -> MachineSpeed:
    """Measure both with torch's threads, by the fastest turn of ``measure``."""
    a, b = (torch.randn(_SIDE, _SIDE, device=device) for _ in range(2))
    x = torch.randn(_NUMBERS, device=device)
    y = torch.empty_like(x)
    steps = {"product": lambda _: a @ b, "copy": lambda _: y.copy_(x)}
    times = measure(steps, device=device, seconds=seconds, rounds=7, kind=clock)
    return MachineSpeed(2 * _SIDE**3 / times["product"].low, 8 * _NUMBERS / times["copy"].low)


def product_speed(device: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> float:
    """Floating-point operations per second of ``rows`` through a matrix, in a fifth of a second.

    Of the usual turn, on a machine as busy as it is. Sizes are cut where one product takes long.
    """
    inputs, outputs = min(inputs, _WIDEST), min(outputs, _WIDEST)
    rows = max(1, min(rows, _PRODUCT // (inputs * outputs)))
    x = torch.randn(rows, inputs, device=device).to(dtype)
    weight = torch.randn(outputs, inputs, device=device).to(dtype)
    step = {"product": lambda _: nn.functional.linear(x, weight)}
    times = measure(step, device=device, seconds=0.1, rounds=5)
    return 2 * rows * inputs * outputs / times["product"].median
