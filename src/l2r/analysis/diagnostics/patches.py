"""Routing of the patches of an image, layer by layer."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from l2r.files.arrays import PatchRouting
from l2r.images import ImageInput, sample_indices
from l2r.routers import capture
from l2r.routers.observe import evaluating
from l2r.routers.offload import device_of
from l2r.text import spread_evenly


@torch.no_grad()
def patch_routing(
    model: nn.Module,
    images: Float[Tensor, "B C H W"],
    grid: tuple[int, int],
    *,
    pixels: UInt8[Tensor, "B C H W"],
    labels: Int[Tensor, " B"],
    classes: tuple[str, ...],
) -> PatchRouting:
    """Route the images once, in evaluation mode; ``grid`` is the number of patch rows, columns.

    ``pixels`` are the images as people see them. The model must put one class token before the
    patches, as ViT does. Raises ValueError when the number of tokens does not fit the grid.
    """
    with evaluating(model), capture(model) as record:
        logits = model(images).logits
    count, tokens = images.shape[0], 1 + grid[0] * grid[1]
    experts, weights, num_experts = [], [], 0
    for calls in record.outputs.values():
        output = calls[0]
        if output.indices.shape[0] != count * tokens:
            raise ValueError(
                f"a grid of {grid[0]} x {grid[1]} patches and a class token give {tokens} tokens "
                f"an image; the model routes {output.indices.shape[0] // count}"
            )
        experts.append(output.indices.view(count, tokens, -1).cpu().numpy())
        weights.append(output.weights.float().view(count, tokens, -1).cpu().numpy())
        num_experts = output.logits.shape[1]
    chosen = np.stack(experts).astype(np.int16)
    shape = (len(experts), count, *grid, chosen.shape[-1])
    return PatchRouting(
        layers=np.array(list(record.outputs)),
        experts=chosen[:, :, 1:].reshape(shape),
        weights=np.stack(weights)[:, :, 1:].reshape(shape),
        class_token=chosen[:, :, 0],
        predictions=logits.argmax(1).cpu().numpy(),
        num_experts=np.array(num_experts),
        images=pixels.permute(0, 2, 3, 1).cpu().numpy(),
        labels=labels.cpu().numpy(),
        classes=np.array(classes),
    )


def validation_patches(model: Any, images: ImageInput, count: int) -> PatchRouting | None:
    """Patch routing of ``count`` validation images, evenly spread; None if none can be read."""
    chosen = sample_indices(images.dataset)
    chosen = chosen[spread_evenly(len(chosen), count)]
    batch = images.dataset.rows(chosen)
    if len(batch.labels) == 0:
        return None
    side = model.config.image_size // model.config.patch_size
    device = device_of(model)
    return patch_routing(
        model,
        images.standard(batch.pixels.to(device)),
        (side, side),
        pixels=batch.pixels,
        labels=batch.labels,
        classes=images.dataset.classes,
    )
