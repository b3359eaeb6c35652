"""Read-ahead for image batches: worker processes that stay a few steps in front."""

import math
from collections.abc import Iterator

import numpy as np
from jaxtyping import Int
from torch.utils.data import DataLoader, Dataset

from l2r.data.images import ImageBatch, ImageDataset


class ImageLoader:
    """Training batches by step, for one rank.

    ``workers`` processes read ahead as long as the steps asked for follow one another; any
    other step starts them anew. The batch of a step is the same for every number of workers.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
    ) -> None:
        self._steps = _Steps(dataset, batch_size, rank, world_size)
        self._workers = workers
        self._ahead: Iterator[ImageBatch] | None = None
        self._next = -1

    def batch(self, step: int) -> ImageBatch:
        """This rank's slice of the global batch at ``step``."""
        if self._workers == 0:
            return self._steps[step]
        if self._ahead is None or step != self._next:
            loader: DataLoader[ImageBatch] = DataLoader(
                self._steps,
                batch_size=None,
                sampler=range(step, _LAST_STEP),
                num_workers=self._workers,
                multiprocessing_context="fork",
            )
            self._ahead = iter(loader)
        self._next = step + 1
        return next(self._ahead)


_LAST_STEP = 2**40


def batches_of(
    dataset: ImageDataset, indices: Int[np.ndarray, " n"], batch_size: int, *, workers: int = 0
) -> Iterator[ImageBatch]:
    """The given images in order, for evaluation; ``workers`` processes read ahead."""
    parts = _Parts(dataset, indices, batch_size)
    context = "fork" if workers else None
    yield from DataLoader(
        parts, batch_size=None, num_workers=workers, multiprocessing_context=context
    )


class _Parts(Dataset[ImageBatch]):
    """Item ``i`` is the i-th batch of the indices."""

    def __init__(
        self, dataset: ImageDataset, indices: Int[np.ndarray, " n"], batch_size: int
    ) -> None:
        self.dataset, self.indices, self.batch_size = dataset, indices, batch_size

    def __len__(self) -> int:
        return math.ceil(len(self.indices) / self.batch_size)

    def __getitem__(self, item: int) -> ImageBatch:
        start = item * self.batch_size
        return self.dataset.rows(self.indices[start : start + self.batch_size])


class _Steps(Dataset[ImageBatch]):
    """Item ``step`` is the batch of that step."""

    def __init__(self, dataset: ImageDataset, batch_size: int, rank: int, world: int) -> None:
        self.dataset, self.batch_size, self.rank, self.world = dataset, batch_size, rank, world

    def __getitem__(self, step: int) -> ImageBatch:
        return self.dataset.training_batch(
            step, self.batch_size, rank=self.rank, world_size=self.world
        )
