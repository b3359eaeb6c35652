"""Batches of images by stream position: crop, scale, stack. No state beyond the source."""

import itertools
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from l2r.errors import InputError, blames_input
from l2r.images.image_sources import (
    SIDEWAYS,
    UNREADABLE,
    ImageSource,
    in_bytes,
    shown_size,
    turn_of,
)
from l2r.text import batch_indices, epoch_order, uniform_draws

_ATTEMPTS = 10  # crops tried before falling back to the whole image, as in torchvision
Box = tuple[int | float, int | float, int | float, int | float]
_IN_A_ROW = 10  # images that cannot be read before the data are refused
_MODES = {1: "L", 3: "RGB"}
# Which images, and in training their positions in the stream.
ImagePlaces = tuple[Int[np.ndarray, " B"], Int[np.ndarray, " B"] | None]


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


@dataclass(frozen=True)
class ImageBatch:
    """pixels [B, C, S, S] bytes, labels [B], positions [B] in the stream.

    skipped: names of unreadable images; in training another image took their place, in
    evaluation they are missing from the batch.
    """

    pixels: Tensor
    labels: Tensor
    positions: Int[np.ndarray, " B"]
    skipped: tuple[str, ...] = ()


class ImageDataset(Dataset[ImageBatch]):
    """Images of one size from a source.

    crop: random for training, central for evaluation. channels: 1 gray or 3 color.
    """

    def __init__(
        self,
        source: ImageSource,
        *,
        size: int,
        channels: int = 3,
        crop: RandomCrop | CenterCrop,
        seed: int = 0,
    ) -> None:
        if channels not in _MODES:
            raise InputError(f"channels must be 1 or 3; got {channels}")
        if len(source.labels) == 0:
            raise InputError("the image source is empty")
        self.source, self.size, self.channels = source, size, channels
        self.crop, self.seed = crop, seed

    def __len__(self) -> int:
        return len(self.source.labels)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the labels."""
        return self.source.classes

    def __getitem__(self, places: ImagePlaces) -> ImageBatch:
        return self.rows(*places)

    def places(
        self, step: int, batch_size: int, *, rank: int = 0, world_size: int = 1
    ) -> ImagePlaces:
        """One rank's slice of the global batch at ``step``, in the shuffled order of the seed."""
        rows = batch_size // world_size
        indices = batch_indices(
            len(self), step, batch_size, seed=self.seed, rank=rank, world_size=world_size
        )
        first = step * batch_size + rank * rows
        return indices, np.arange(first, first + rows)

    def rows(
        self, indices: Int[np.ndarray, " B"], positions: Int[np.ndarray, " B"] | None = None
    ) -> ImageBatch:
        """Read images. With ``positions`` (training) an unreadable one is replaced by the next.

        Raises ValueError when no image near an unreadable one can be read.
        """
        training = positions is not None
        places = np.asarray(indices if positions is None else positions, dtype=np.int64)
        draws = uniform_draws(places, self.crop.draws, seed=self.seed, purpose="crop")
        pixels, labels, kept, skipped = [], [], [], []
        for row, index in enumerate(indices):
            for attempt in range(_IN_A_ROW):
                chosen = (int(index) + attempt) % len(self)
                image = self._read(chosen, draws[row])
                if image is not None:
                    pixels.append(image)
                    labels.append(int(self.source.labels[chosen]))
                    kept.append(row)
                    break
                skipped.append(self.source.name(chosen))
                if not training:
                    break
            else:
                raise InputError(f"{_IN_A_ROW} images in a row are unreadable: {skipped[-1]}")
        shape = (0, self.size, self.size, self.channels)
        stack = np.stack(pixels) if pixels else np.empty(shape, dtype=np.uint8)
        tensor = torch.from_numpy(stack).permute(0, 3, 1, 2).contiguous()
        return ImageBatch(
            tensor, torch.tensor(labels, dtype=torch.int64), places[kept], tuple(skipped)
        )

    def _read(
        self, index: int, draws: Float[np.ndarray, " D"]
    ) -> UInt8[np.ndarray, "S S C"] | None:
        """Pixels, or None for an image that cannot be decoded."""
        try:
            with self.source.open(index) as image:
                turn, box = turn_of(image), self.crop.box(*shown_size(image), draws)
                if turn in SIDEWAYS:  # of the stored image; no crop prefers a side
                    box = (box[1], box[0], box[3], box[2])
                return self._scaled(image, box, turn)
        except UNREADABLE as error:
            if not blames_input(error):
                raise
            return None

    def _scaled(
        self, image: Image.Image, box: Box, turn: Image.Transpose | None
    ) -> UInt8[np.ndarray, "S S C"]:
        """Crop, scale with antialiasing, turn; a JPEG is decoded at the least scale that does."""
        full_width, full_height = image.size
        shrink = min((box[2] - box[0]) / self.size, (box[3] - box[1]) / self.size)
        mode = _MODES[self.channels]
        if shrink >= 2:
            image.draft(mode, (int(full_width / shrink), int(full_height / shrink)))
        x, y = image.size[0] / full_width, image.size[1] / full_height
        area = (box[0] * x, box[1] * y, box[2] * x, box[3] * y)
        image = in_bytes(image)
        converted = image if image.mode == mode else image.convert(mode)
        size = (self.size, self.size)
        if converted.size != size or area != (0, 0, *size):
            converted = converted.resize(size, Image.Resampling.BICUBIC, box=area)
        if turn is not None:
            converted = converted.transpose(turn)
        pixels = np.asarray(converted, dtype=np.uint8)
        return pixels[:, :, None] if self.channels == 1 else pixels


class ImageLoader:
    """Training batches by step: those of ``ImageDataset.places(step, **cut)``.

    ``workers`` processes read ahead as long as the steps asked for follow one another; any
    other step restarts them. The batch of a step is the same for every number of workers.
    """

    def __init__(self, dataset: ImageDataset, *, workers: int = 0, **cut: int) -> None:
        self._dataset, self._workers = dataset, workers
        self._cut = cut
        self._ahead: Iterator[ImageBatch] | None = None
        self._next = -1

    def batch(self, step: int) -> ImageBatch:
        """Read this rank's slice of the global batch at ``step``."""
        if self._workers == 0:
            return self._dataset[self._dataset.places(step, **self._cut)]
        if self._ahead is None or step != self._next:
            dataset, cut = self._dataset, self._cut  # not self: a cycle would keep the workers
            places = (dataset.places(n, **cut) for n in itertools.count(step))
            self._ahead = read_ahead(dataset, places, self._workers)
        self._next = step + 1
        return next(self._ahead)


def read_ahead(
    dataset: ImageDataset, places: Iterable[ImagePlaces], workers: int
) -> Iterator[ImageBatch]:
    """Read a batch for each of ``places``, in order; ``workers`` processes read ahead.

    They start from a clean process: a fork of this one waits forever for any lock that another
    thread (of autograd, a tokenizer, a logger) held at that moment.
    """
    context = multiprocessing.get_context("forkserver") if workers else None
    if context is not None:
        context.set_forkserver_preload([__name__])  # else every worker imports torch
    yield from DataLoader(
        dataset,
        batch_size=None,
        sampler=places,
        num_workers=workers,
        multiprocessing_context=context,
    )


def standardize(
    images: Float[Tensor, "B C H W"], mean: Sequence[float], deviation: Sequence[float]
) -> Float[Tensor, "B C H W"]:
    """Pixels in [0, 1] minus the channels' mean, over their deviation."""
    center, scale = (
        torch.tensor(values, dtype=images.dtype, device=images.device).view(1, -1, 1, 1)
        for values in (mean, deviation)
    )
    return (images - center) / scale


def sample_indices(dataset: ImageDataset, limit: int | None = None) -> Int[np.ndarray, " n"]:
    """All images, or ``limit`` of them drawn from everywhere, ascending, the same every time.

    Folders are sorted by class, so the first images would be those of the first classes. Raises
    ValueError for less than one image.
    """
    if limit is not None and limit < 1:
        raise InputError(f"images to take must be >= 1; got {limit}")
    count = len(dataset) if limit is None else min(limit, len(dataset))
    return np.sort(epoch_order(len(dataset), 0, 0)[:count]).astype(np.int64)
