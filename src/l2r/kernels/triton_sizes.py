"""Sizes that the launches share: padded ranks, powers of two, the device of a launch."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from l2r.kernels.triton_blocks import COSINE_SCORES, DOT_SCORES, SIPS_SCORES

SCORINGS = {"dot": DOT_SCORES, "cosine": COSINE_SCORES, "sips": SIPS_SCORES}


class Rank(NamedTuple):
    """How products over the rank run: padded size, and whether on the matrix units."""

    padded: int
    dot: bool

    @classmethod
    def of(cls, rank: int) -> "Rank":
        padded = triton.next_power_of_2(rank)
        return cls(padded, False) if padded <= 4 else cls(max(16, padded), True)


def power(size: int, smallest: int) -> int:
    return max(smallest, triton.next_power_of_2(size))


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch on the tensor's device, also where another one is current."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
