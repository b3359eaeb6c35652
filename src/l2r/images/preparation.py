"""Preparation of images for a model; read without torch."""

import dataclasses
from typing import NamedTuple


class Standard(NamedTuple):
    """Mean and deviation of pixels in [0, 1], by channel."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Preparation:
    """Images as a model wants them: where they are, share of the shorter side, statistics."""

    standard: Standard
    images: str = "digits"
    center: float = 0.875
