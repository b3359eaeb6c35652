"""RandAugment with kornia's image operations, a choice and a strength per image.

NOTE: the paper says only "RandAugment: on". We follow the DeiT recipe that its backbone comes
from: 2 operations, magnitude 9 of 10 with standard deviation 0.5, each applied with probability
0.5, all stronger with growing magnitude. kornia's own RandAugment differs in three ways that
matter here: one choice for the whole batch, the global random state, and shears up to 54 degrees.
"""

import math
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from kornia.enhance import (
    adjust_contrast,
    adjust_contrast_with_mean_subtraction,
    adjust_saturation_with_gray_subtraction,
    equalize,
    normalize_min_max,
    posterize,
    sharpness,
    solarize,
)
from kornia.geometry.transform import warp_affine
from torch import Tensor

# Random numbers per image and operation: which one, whether, how strong, which direction.
DRAWS_PER_OPERATION = 4

# An operation takes images [B, C, H, W] in [0, 1], a level [B] in [0, 1] and a sign [B].
Operation = Callable[[Tensor, Tensor, Tensor], Tensor]


def rand_augment(
    images: Float[Tensor, "B C H W"],
    draws: Float[Tensor, "B D"],
    *,
    magnitude: float,
    deviation: float = 0.5,
    probability: float = 0.5,
) -> Float[Tensor, "B C H W"]:
    """Apply random operations to every image in [0, 1]: one per DRAWS_PER_OPERATION columns.

    ``draws`` are uniform numbers on the CPU; ``magnitude`` goes to 10. Images that drew the same
    operation go through it together.
    """
    gray = images.shape[1] == 1
    table = [f for name, f in OPERATIONS.items() if not (gray and name == "color")]
    for which, whether, strength, direction in torch.split(draws.T, DRAWS_PER_OPERATION):
        noise = torch.special.ndtri(strength.clamp(1e-6, 1 - 1e-6))
        level = ((magnitude + deviation * noise) / 10).clamp(0, 1).to(images)
        sign = torch.where(direction < 0.5, -1.0, 1.0).to(images)
        choice = torch.where(whether < probability, (which * len(table)).long(), -1)
        result = images.clone()
        for position, operation in enumerate(table):
            rows = (choice == position).nonzero().squeeze(1).to(images.device)
            if len(rows):
                result[rows] = operation(images[rows], level[rows], sign[rows]).clamp(0, 1)
        images = result
    return images


def _factor(adjust: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    """Color, contrast, brightness and sharpness: a factor of 1 -/+ 0.9 at full level."""
    return lambda images, level, sign: adjust(images, 1 + 0.9 * level * sign)


def _auto_contrast(images: Tensor, _: Tensor, __: Tensor) -> Tensor:
    """Stretch each channel to [0, 1]; kornia's turns a channel of one value black."""
    lowest, highest = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    return torch.where(lowest < highest, normalize_min_max(images), images)


def _solarize(images: Tensor, level: Tensor, _: Tensor) -> Tensor:
    """Invert the brightest floor(256 level) of the 256 bytes; none at level 0."""
    darkest = 256 - torch.floor(256 * level)
    return solarize(images, (darkest - 0.5) / 255)  # between two bytes


def _solarize_add(images: Tensor, level: Tensor, _: Tensor) -> Tensor:
    """Brighten the dark half only; kornia's additions touch the whole image and invert."""
    added = (images + level.view(-1, 1, 1, 1) * (110 / 255)).clamp_max(1)
    return torch.where(images < 0.5, added, images)


def _geometric(entries: Mapping[tuple[int, int], Callable[[Tensor], Tensor]]) -> Operation:
    """Affine map about the center, in units of the image size; gray where nothing is.

    ``entries`` maps (row, column) of the 2 x 3 matrix to a function of level * sign; column 2
    shifts by a fraction of width (row 0) or height (row 1).
    """

    def apply(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
        count, channels, height, width = images.shape
        matrix = torch.eye(2, 3, device=images.device, dtype=images.dtype).repeat(count, 1, 1)
        for (row, column), function in entries.items():
            matrix[:, row, column] = function(level * sign)
        size = torch.tensor([width, height], device=images.device, dtype=images.dtype)
        center = (size - 1) / 2
        matrix[:, :, 2] = matrix[:, :, 2] * size + center - matrix[:, :, :2] @ center
        gray = torch.full((channels,), 0.5, device=images.device, dtype=images.dtype)
        return warp_affine(images, matrix, (height, width), padding_mode="fill", fill_value=gray)

    return apply


def _angle(amount: Tensor) -> Tensor:
    return amount * math.radians(30)


OPERATIONS: dict[str, Operation] = {
    "auto_contrast": _auto_contrast,
    "equalize": lambda images, level, sign: equalize(images),
    "invert": lambda images, level, sign: 1 - images,
    "rotate": _geometric(
        {
            (0, 0): lambda a: torch.cos(_angle(a)),
            (0, 1): lambda a: torch.sin(_angle(a)),
            (1, 0): lambda a: -torch.sin(_angle(a)),
            (1, 1): lambda a: torch.cos(_angle(a)),
        }
    ),
    "posterize": lambda images, level, sign: posterize(
        images, (4 - torch.floor(4 * level)).clamp_min(1).to(torch.int32)
    ),
    "solarize": _solarize,
    "solarize_add": _solarize_add,
    "color": _factor(adjust_saturation_with_gray_subtraction),
    "contrast": _factor(adjust_contrast_with_mean_subtraction),
    "brightness": _factor(adjust_contrast),  # kornia's adjust_contrast multiplies
    "sharpness": _factor(sharpness),
    "shear_x": _geometric({(0, 1): lambda a: 0.3 * a}),
    "shear_y": _geometric({(1, 0): lambda a: 0.3 * a}),
    "translate_x": _geometric({(0, 2): lambda a: 0.45 * a}),
    "translate_y": _geometric({(1, 2): lambda a: 0.45 * a}),
}
