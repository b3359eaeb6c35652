"""Training images: flip, RandAugment, normalization, random erasing, mixup and CutMix.

Everything is decided by the images' positions in the training stream (shuffling.py)
and runs on the device of the pixels.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from l2r.errors import InputError
from l2r.images import standardize
from l2r.text import uniform_draws
from l2r_lab.vision.randaugment import DRAWS_PER_OPERATION, rand_augment


def augment(
    pixels: UInt8[Tensor, "B C H W"],
    labels: Int[Tensor, " B"],
    positions: Int[np.ndarray, " B"],
    *,
    classes: int,
    flip: float,
    randaugment: int,
    magnitude: float,
    erasing: float,
    mixup: float,
    cutmix: float,
    label_smoothing: float,
    mean: Sequence[float],
    deviation: Sequence[float],
    seed: int,
) -> tuple[Float[Tensor, "B C H W"], Float[Tensor, "B classes"]]:
    """Augmented, normalized images and their soft targets; zero switches a step off.

    flip, erasing: probabilities. randaugment: number of operations, of ``magnitude`` 0 to 10.
    mixup, cutmix: alpha of the Beta distribution of the share; where both are on, each pair of
    images takes one of them at random. label_smoothing: share given to all classes alike.
    mean, deviation: per channel, of pixels in [0, 1].
    ``positions`` are places in the training stream, in the order of the batch. With mixing on,
    neighbors (2i, 2i + 1) form pairs. Raises ValueError if a pair is cut by the batch.
    """
    images = pixels / 255
    columns = 6 + DRAWS_PER_OPERATION * randaugment
    draws = torch.from_numpy(uniform_draws(positions, columns, seed=seed, purpose="image"))
    flipped = (draws[:, 0] < flip).to(images.device).view(-1, 1, 1, 1)
    images = torch.where(flipped, images.flip(-1), images)
    if randaugment:
        images = rand_augment(images, draws[:, 6:], magnitude=magnitude)
    images = standardize(images, mean, deviation)
    if erasing > 0:
        images = erase(images, draws[:, 1:6], probability=erasing)
    targets = smooth_targets(labels, classes, label_smoothing)
    if mixup > 0 or cutmix > 0:
        images, targets = mix(images, targets, positions, mixup=mixup, cutmix=cutmix, seed=seed)
    return images, targets


def erase(
    images: Float[Tensor, "B C H W"], draws: Float[Tensor, "B 5"], *, probability: float
) -> Float[Tensor, "B C H W"]:
    """Random erasing: a box of 2% to 33% of the area and aspect 0.3 to 3.3, set to zero.

    The columns of ``draws`` decide: whether, area, aspect, row, column.
    NOTE: the paper does not say what fills the box; after normalization zero is the mean color.
    """
    height, width = images.shape[-2:]
    area = (0.02 + (0.33 - 0.02) * draws[:, 1]) * height * width
    aspect = 0.3 ** (1 - 2 * draws[:, 2])  # log-uniform
    tall = (area * aspect).sqrt().round().clamp(1, height)
    wide = (area / aspect).sqrt().round().clamp(1, width)
    top = (draws[:, 3] * (height - tall + 1)).floor()
    left = (draws[:, 4] * (width - wide + 1)).floor()
    box = _box((top, left), (top + tall, left + wide), (height, width))
    box = box & (draws[:, 0] < probability).view(-1, 1, 1)
    return images.masked_fill(box.to(images.device).unsqueeze(1), 0)


def smooth_targets(
    labels: Int[Tensor, " B"], classes: int, smoothing: float
) -> Float[Tensor, "B classes"]:
    """One-hot labels with ``smoothing`` of the mass spread over all classes."""
    one_hot = torch.nn.functional.one_hot(labels.long(), classes).to(torch.float32)
    return one_hot * (1 - smoothing) + smoothing / classes


def mix(
    images: Float[Tensor, "B C H W"],
    targets: Float[Tensor, "B classes"],
    positions: Int[np.ndarray, " B"],
    *,
    mixup: float,
    cutmix: float,
    seed: int,
) -> tuple[Float[Tensor, "B C H W"], Float[Tensor, "B classes"]]:
    """Mixup or CutMix of each pair of neighbors, with one share and one box per pair.

    kornia's mixup draws its share uniformly; the recipe asks for Beta(0.8, 0.8).
    """
    even = positions[0::2]
    if len(positions) % 2 or np.any(even % 2) or np.any(positions[1::2] != even + 1):
        raise InputError(
            f"mixup and CutMix pair neighbors in the stream, so the micro-batch of every rank "
            f"must be even; got {len(positions)} images from position {positions[0]}"
        )
    from scipy.special import betaincinv

    draws = uniform_draws(even, 4, seed=seed, purpose="mix").repeat(2, axis=0)
    both = mixup > 0 and cutmix > 0
    cut = draws[:, 0] < (0.5 if both else float(cutmix > 0))
    alpha = np.where(cut, cutmix, mixup)
    share = torch.from_numpy(betaincinv(alpha, alpha, draws[:, 1]))
    height, width = images.shape[-2:]
    row, column = torch.from_numpy(draws[:, 2:]).T
    top, bottom = _interval(row, (1 - share).sqrt(), height)
    left, right = _interval(column, (1 - share).sqrt(), width)
    box = _box((top, left), (bottom, right), (height, width))
    kept = 1 - box.to(torch.float64).mean(dim=(1, 2))  # the share that the cut box really leaves
    cuts = torch.from_numpy(cut)
    share = torch.where(cuts, kept, share).to(images)
    cuts, box = cuts.to(images.device), box.to(images.device)
    partner = _swap_neighbors(images)
    other = _swap_neighbors(targets)
    blend = share.view(-1, 1, 1, 1)
    pasted = torch.where(box.unsqueeze(1), partner, images)
    mixed = torch.where(cuts.view(-1, 1, 1, 1), pasted, blend * images + (1 - blend) * partner)
    return mixed, share.view(-1, 1) * targets + (1 - share.view(-1, 1)) * other


def _interval(center: Tensor, share: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Start and end of a piece of ``share`` of the size around a center, cut at the border."""
    length = (share * size).floor()
    start = (center * size).floor() - length.div(2, rounding_mode="floor")
    return start.clamp_min(0), (start + length).clamp_max(size)


def _box(
    start: tuple[Tensor, Tensor], end: tuple[Tensor, Tensor], size: tuple[int, int]
) -> Bool[Tensor, "B H W"]:
    """Mask of the pixels between (top, left) and (bottom, right), one pair per image."""
    inside = [
        (torch.arange(n) >= low[:, None]) & (torch.arange(n) < high[:, None])
        for low, high, n in zip(start, end, size, strict=True)
    ]
    return inside[0][:, :, None] & inside[1][:, None, :]


def _swap_neighbors(values: Tensor) -> Tensor:
    return values.view(-1, 2, *values.shape[1:]).flip(1).reshape(values.shape)
