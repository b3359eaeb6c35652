"""Images for a checkpoint: those of its run, or of a folder, as batches."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from l2r.errors import InputError
from l2r.files.folder import RunFolder
from l2r.images.image_sources import ImageSource, open_images
from l2r.images.images import CenterCrop, ImageDataset, sample_indices, standardize
from l2r.images.preparation import Preparation, Standard
from l2r.laboratory import need_laboratory

_SHOWN_CLASSES = 20  # classes with a separate row in figures; the rest share one


@dataclasses.dataclass(frozen=True)
class ImageInput:
    """Validation images, prepared as a checkpoint's inputs, with the class as the domain."""

    dataset: ImageDataset
    preparation: Preparation

    @property
    def domains(self) -> tuple[str, ...]:
        """Names of the classes; all after the first nineteen share one where there are many."""
        names = self.dataset.classes
        if len(names) <= _SHOWN_CLASSES:
            return names
        return (*names[: _SHOWN_CLASSES - 1], "other")

    def batches(
        self,
        count: int,
        size: int,
        device: torch.device,
        report: Callable[[str], object] = lambda line: None,
    ) -> Iterator[dict[str, Tensor]]:
        """Batches of ``pixel_values`` [B, C, H, W], ``domain`` and ``targets`` [B], of ``count``
        images, without those that cannot be read. Raises ValueError when none can.

        ``report`` gets a line about them, before the last batch.
        """
        chosen = sample_indices(self.dataset, count)
        skipped: list[str] = []
        for start in range(0, len(chosen), size):
            batch = self.dataset.rows(chosen[start : start + size])
            skipped += batch.skipped
            is_last = start + size >= len(chosen)
            if is_last and skipped and len(skipped) < len(chosen):
                report(
                    f"left out {len(skipped)} of {len(chosen)} images, which cannot be read, "
                    f"e.g. {skipped[0]}"
                )
            if len(batch.labels) == 0:
                continue
            labels = batch.labels.to(device)
            pixels = self.standard(batch.pixels.to(device))
            domain = labels.clamp_max(len(self.domains) - 1)
            yield {"pixel_values": pixels, "domain": domain, "targets": labels}
        if skipped and len(skipped) == len(chosen):
            raise InputError(f"none of {len(chosen)} images can be read, e.g. {skipped[0]}")

    def standard(self, pixels: Tensor) -> Tensor:
        """Convert bytes to the model's input."""
        return standardize(pixels / 255, *self.preparation.standard)


def open_image_input(checkpoint: str | Path, config: Any, source: str | None) -> ImageInput:
    """Open validation images for the model with ``config``: ``source``, or those of its run.

    A checkpoint that is no run of ours is taken to want ImageNet's mean and deviation, or 0.5
    for gray images. Classes of ``source`` are those of the model by name. Raises ValueError without
    images, and for a class that the model has not.
    """
    run = RunFolder(checkpoint)
    if run.is_run():
        of_run = need_laboratory("training", "images_of_run", "the recipe of a run folder")
        wanted: Preparation = of_run(run)
    elif source is None:
        raise InputError(f"{checkpoint} is no run folder, so --data must name images")
    elif config.num_channels == 1:
        wanted = Preparation(Standard((0.5,), (0.5,)))
    else:
        wanted = Preparation(Standard((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    images = open_images(source or wanted.images)[1]
    dataset = ImageDataset(
        images if source is None else _with_labels_of(config, images),
        size=config.image_size,
        channels=config.num_channels,
        crop=CenterCrop(share=wanted.center),
    )
    return ImageInput(dataset, wanted)


def _with_labels_of(config: Any, images: ImageSource) -> ImageSource:
    """Return the same images with the model's numbers of their classes.

    A model that shares no name with them (``LABEL_0``; words where folders are WordNet ids) has
    them in the same order, if it has as many.
    """
    names = [config.id2label[number] for number in range(config.num_labels)]
    strange = [name for name in images.classes if name not in names]
    if len(strange) == len(images.classes) == len(names):
        return images
    if strange:
        raise InputError(f"the images have the class {strange[0]!r}, which the model has not")
    numbers = np.array([names.index(name) for name in images.classes], dtype=np.int64)
    return ImageSource(images.items, numbers[images.labels], tuple(names))
