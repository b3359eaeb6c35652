"""Facts about the images of a source: size, color, mean and deviation of their pixels."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median_low

import numpy as np

from l2r.errors import InputError, blames_input
from l2r.images import UNREADABLE, ImageDataset, ImageSource, shown_size
from l2r.text import epoch_order

MOST = 1000  # images that are looked at, drawn from everywhere
_GRAY = frozenset({"1", "L", "LA", "La", "I", "F"})  # pillow's modes, besides those of 16 bits
_BATCH = 64


@dataclass(frozen=True)
class ImageFacts:
    """Median width and height in pixels, whether any is stored in color, how many were seen."""

    width: int
    height: int
    color: bool
    images: int


def image_facts(source: ImageSource) -> ImageFacts:
    """Look at the headers of at most 1000 images. Raises ValueError where none can be read."""
    sizes, color = [], False
    for index in _sample(len(source.labels)):
        try:
            with source.open(index) as image:
                sizes.append(shown_size(image))
                color |= image.mode.partition(";")[0] not in _GRAY
        except UNREADABLE as error:
            if not blames_input(error):
                raise
            continue
    if not sizes:
        raise InputError(f"none of the images can be read, such as {source.name(0)}")
    width, height = (median_low(side) for side in zip(*sizes, strict=True))
    return ImageFacts(width, height, color, len(sizes))


def mean_and_deviation(
    dataset: ImageDataset, digits: int = 3
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure pixels in [0, 1], per channel, over at most 1000 images as the dataset cuts them.

    Raises ValueError where none can be read.
    """
    count, total, squares = 0, np.zeros(dataset.channels), np.zeros(dataset.channels)
    indices = np.array(list(_sample(len(dataset))), dtype=np.int64)
    for start in range(0, len(indices), _BATCH):
        batch = dataset.rows(indices[start : start + _BATCH]).pixels.double().numpy() / 255
        count += batch[:, 0].size
        total += batch.sum(axis=(0, 2, 3))
        squares += np.square(batch).sum(axis=(0, 2, 3))
    if not count:
        raise InputError(f"none of the images can be read, such as {dataset.source.name(0)}")
    least = 1 / 255  # images of one color have no deviation to divide by
    mean = tuple(float(round(value, digits)) for value in total / count)
    variances = squares / count - np.square(total / count)
    return mean, tuple(round(max(least, math.sqrt(max(0, v))), digits) for v in variances)


def _sample(count: int) -> Iterator[int]:
    return iter(sorted(int(index) for index in epoch_order(count, 0, 0)[:MOST]))
