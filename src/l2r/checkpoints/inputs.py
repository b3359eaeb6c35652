"""What is diagnosed: a checkpoint of either kind with the data it reads, as one thing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from l2r.checkpoints import is_image_classifier, load_causal_lm, load_image_classifier
from l2r.checkpoints.text_input import open_text

if TYPE_CHECKING:
    from l2r.checkpoints.image_input import ImageInput


@dataclass(frozen=True)
class Subject:
    """A model, its batches by (size, device), how many items there are, and their domains.

    images: where an image classifier's batches come from. tokenizer: of a language model, where
    the checkpoint has one.
    """

    model: nn.Module
    batches: Callable[[int, torch.device], Iterator[dict[str, Tensor]]]
    items: int
    domains: tuple[str, ...]
    options: dict[str, Any]
    images: "ImageInput | None" = None
    tokenizer: Any = None

    def run(self, model: nn.Module, inputs: dict[str, Tensor]) -> Any:
        """One forward pass; ``targets`` are not for the model."""
        known = {name: value for name, value in inputs.items() if name != "targets"}
        return model(**known, **self.options)


def open_subject(
    checkpoint: str,
    data: str | None,
    *,
    instances: int,
    length: int,
    report: Callable[[str], None],
) -> Subject:
    """Load a checkpoint and the text or the images that it reads.

    Raises ValueError for folders that hold neither, and for data that does not fit.
    """
    if is_image_classifier(checkpoint):
        from l2r.checkpoints.image_input import open_image_input  # text needs no image package

        model = load_image_classifier(checkpoint)
        images = open_image_input(checkpoint, model.config, data)
        count = min(instances, len(images.dataset))

        def batches(size: int, device: torch.device) -> Iterator[dict[str, Tensor]]:
            return images.batches(count, size, device)

        return Subject(model, batches, count, images.domains, {}, images)
    model, tokenizer = load_causal_lm(checkpoint)
    text = open_text(
        data,
        tokenizer,
        vocab_size=model.config.vocab_size,
        instances=instances,
        length=length,
        report=report,
    )
    return Subject(
        model,
        text.batches,
        len(text.rows),
        text.domains,
        {"use_cache": False},
        tokenizer=tokenizer,
    )
