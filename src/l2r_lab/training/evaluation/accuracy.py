"""Top-1 and top-5 accuracy of an image classifier."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from l2r.errors import InputError
from l2r.images import ImageDataset, read_ahead, sample_indices, standardize
from l2r.routers.observe import evaluating
from l2r.routers.offload import device_of


@dataclass(frozen=True)
class Accuracy:
    """Shares of ``images`` whose label is the first guess, or among the first five.

    loss: mean cross-entropy of the hard labels, in nats. skipped: unreadable images, which
    count nowhere else.
    """

    top1: float
    top5: float
    loss: float
    images: int
    skipped: tuple[str, ...] = ()


@torch.no_grad()
def evaluate_accuracy(
    model: nn.Module,
    dataset: ImageDataset,
    *,
    mean: Sequence[float],
    deviation: Sequence[float],
    batch_size: int = 64,
    max_images: int | None = None,
    workers: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Accuracy:
    """Run the model in evaluation mode over the whole set, or a fixed sample of ``max_images``.

    ``model`` returns an output with ``logits`` [B, C], or the logits; give the averaged model to
    evaluate an exponential moving average. ``workers`` processes read images ahead.
    ``progress`` gets (images done, images in all).
    With fewer than five classes top-5 is 1. The model's mode is restored afterwards.

    Raises ValueError for counts below 1, when no image can be read or a label is outside the
    model's classes.
    """
    if batch_size < 1:
        raise InputError(f"batch_size must be >= 1; got {batch_size}")
    device = device_of(model)
    indices = sample_indices(dataset, max_images)
    total = len(indices)
    parts = ((indices[start : start + batch_size], None) for start in range(0, total, batch_size))
    first = five = count = 0
    loss = 0.0
    skipped: list[str] = []
    with evaluating(model):
        for batch in read_ahead(dataset, parts, workers):
            skipped += batch.skipped
            if len(batch.labels) == 0:
                continue
            output = model(standardize(batch.pixels.to(device) / 255, mean, deviation))
            logits = getattr(output, "logits", output).float()
            labels = batch.labels.to(device)
            if int(labels.max()) >= logits.shape[1]:
                raise InputError(
                    f"the model has {logits.shape[1]} classes; got an image of class "
                    f"{dataset.classes[int(labels.max())]!r}, number {int(labels.max())}"
                )
            guesses = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            first += int(guesses[:, 0].sum())
            five += int(guesses.any(dim=1).sum())
            loss += float(nn.functional.cross_entropy(logits, labels, reduction="sum"))
            count += len(labels)
            progress(count + len(skipped), total)
    if count == 0:
        raise InputError(f"none of {total} images can be read, e.g. {skipped[0]}")
    return Accuracy(first / count, five / count, loss / count, count, tuple(skipped))
