"""Read-ahead for image batches: worker processes that stay a few steps in front."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count

from torch.utils.data import DataLoader

from l2r.data.images import ImageBatch, ImageDataset, Places


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
        self._dataset, self._workers = dataset, workers
        self._places = partial(
            dataset.places, batch_size=batch_size, rank=rank, world_size=world_size
        )
        self._ahead: Iterator[ImageBatch] | None = None
        self._next = -1

    def batch(self, step: int) -> ImageBatch:
        """This rank's slice of the global batch at ``step``."""
        if self._workers == 0:
            return self._dataset[self._places(step)]
        if self._ahead is None or step != self._next:
            places = (self._places(number) for number in count(step))
            self._ahead = read_ahead(self._dataset, places, self._workers)
        self._next = step + 1
        return next(self._ahead)


def read_ahead(
    dataset: ImageDataset, places: Iterable[Places], workers: int
) -> Iterator[ImageBatch]:
    """A batch for each of ``places``, in order; ``workers`` processes read ahead."""
    context = "fork" if workers else None
    yield from DataLoader(
        dataset,
        batch_size=None,
        sampler=places,
        num_workers=workers,
        multiprocessing_context=context,
    )
