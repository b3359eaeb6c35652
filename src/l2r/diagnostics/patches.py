"""Which patches of an image go to which expert, layer by layer."""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from l2r.checkpoints.image_input import ImageInput
from l2r.data.images import sample_indices
from l2r.routers import capture


@dataclass(frozen=True)
class PatchRouting:
    """Routing of the patches of B images in L layers; patches form a grid of P x Q.

    experts [L, B, P, Q, K]: chosen experts, the heaviest first. weights, of the same shape:
    what their outputs are multiplied by. class_token [L, B, K]: experts of the class token.
    predictions [B]: class that the model guesses. num_experts: N.
    """

    layers: tuple[str, ...]
    experts: Int[np.ndarray, "L B P Q K"]
    weights: Float[np.ndarray, "L B P Q K"]
    class_token: Int[np.ndarray, "L B K"]
    predictions: Int[np.ndarray, " B"]
    num_experts: int


@torch.no_grad()
def patch_routing(
    model: nn.Module, images: Float[Tensor, "B C H W"], grid: tuple[int, int]
) -> PatchRouting:
    """Route the images once, in evaluation mode; ``grid`` is the number of patch rows, columns.

    The model must put one class token before the patches, as ViT does. Raises ValueError when
    the number of tokens does not fit the grid.
    """
    was_training = model.training
    model.eval()
    with capture(model) as record:
        logits = model(images).logits
    model.train(was_training)
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
    chosen = np.stack(experts)
    shape = (len(experts), count, *grid, chosen.shape[-1])
    return PatchRouting(
        layers=tuple(record.outputs),
        experts=chosen[:, :, 1:].reshape(shape),
        weights=np.stack(weights)[:, :, 1:].reshape(shape),
        class_token=chosen[:, :, 0],
        predictions=logits.argmax(1).cpu().numpy(),
        num_experts=num_experts,
    )


def save_patch_routing(
    path: Path,
    routing: PatchRouting,
    pixels: UInt8[np.ndarray, "B C H W"],
    labels: Int[np.ndarray, " B"],
    classes: tuple[str, ...],
) -> Path:
    """Write the routing and its images to one .npz file, which l2r.report.patches draws."""
    stream = io.BytesIO()
    np.savez_compressed(
        stream,
        layers=np.array(routing.layers),
        experts=routing.experts.astype(np.int16),
        weights=routing.weights.astype(np.float32),
        class_token=routing.class_token.astype(np.int16),
        predictions=routing.predictions,
        num_experts=np.array(routing.num_experts),
        images=pixels.transpose(0, 2, 3, 1),
        labels=labels,
        classes=np.array(classes),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_bytes(stream.getvalue())
    temporary.replace(path)
    return path


def save_patches(path: Path, model: Any, images: ImageInput, count: int) -> Path:
    """Write the routing of ``count`` validation images, patch by patch, to a .npz file."""
    chosen = sample_indices(images.dataset)
    chosen = chosen[np.linspace(0, len(chosen) - 1, min(count, len(chosen))).astype(np.int64)]
    batch = images.dataset.rows(chosen)
    side = model.config.image_size // model.config.patch_size
    device = next(model.parameters()).device
    routing = patch_routing(model, images.standard(batch.pixels.to(device)), (side, side))
    return save_patch_routing(
        path,
        routing,
        batch.pixels.numpy(),
        batch.labels.numpy(),
        images.dataset.classes,
    )
