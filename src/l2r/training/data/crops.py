"""Crops: which part of an image is scaled to the size of the model's input."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float

_ATTEMPTS = 10  # crops tried before falling back to the whole image, as in torchvision
Box = tuple[int | float, int | float, int | float, int | float]


@dataclass(frozen=True, kw_only=True)
class RandomCrop:
    """Random resized crop: its share of the area and its aspect (width / height), as ranges."""

    draws: ClassVar[int] = 2 * _ATTEMPTS + 2
    scale: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)

    def box(self, width: int, height: int, draws: Float[np.ndarray, " D"]) -> Box:
        """(left, top, right, bottom); the middle of a wide or tall image if no try fits."""
        low, high = np.log(self.aspect)
        for attempt in range(_ATTEMPTS):
            share = self.scale[0] + (self.scale[1] - self.scale[0]) * draws[2 * attempt]
            aspect = np.exp(low + (high - low) * draws[2 * attempt + 1])
            wide = round(float(np.sqrt(share * width * height * aspect)))
            tall = round(float(np.sqrt(share * width * height / aspect)))
            if 0 < wide <= width and 0 < tall <= height:
                left = int(draws[-2] * (width - wide + 1))
                top = int(draws[-1] * (height - tall + 1))
                return (left, top, left + wide, top + tall)
        wide = min(width, round(height * self.aspect[1]))
        tall = min(height, round(width / self.aspect[0]))
        left, top = (width - wide) // 2, (height - tall) // 2
        return (left, top, left + wide, top + tall)


@dataclass(frozen=True, kw_only=True)
class CenterCrop:
    """The central square whose side is this share of the shorter side."""

    draws: ClassVar[int] = 0
    share: float = 0.875

    def box(self, width: int, height: int, draws: Float[np.ndarray, " D"]) -> Box:
        """(left, top, right, bottom); nothing is random."""
        side = min(width, height) * self.share
        left, top = (width - side) / 2, (height - side) / 2
        return (left, top, left + side, top + side)
