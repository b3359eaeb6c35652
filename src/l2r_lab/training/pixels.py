"""Sizes, channels, mean and deviation of a vision recipe, where it leaves them to its images."""

from collections.abc import Callable
from typing import Any

from l2r.errors import InputError
from l2r.images import BUILT_IN_IMAGES, CenterCrop, ImageDataset, ImageSource, open_images
from l2r_lab.training.recipes import AnyRecipe, VisionRecipe, VitSection
from l2r_lab.vision import ImageFacts, image_facts, mean_and_deviation

_LARGEST = 224  # larger images are scaled down to ViT-S's size
_PATCH = 16  # pixels of a patch, as in ViT-S/16, where that leaves at least ...
_FEWEST, _MOST = 4, 16  # ... so many patches along a side


def with_pixels(recipe: AnyRecipe) -> AnyRecipe:
    """Complete a recipe by its images; they are opened only if it leaves something to them.

    Raises ValueError for images that cannot be read and for values that do not fit them.
    """
    if not isinstance(recipe, VisionRecipe) or not recipe.open_fields():
        return recipe
    return read_pixels(recipe, open_images(recipe.data.images)[0], lambda line: None)


def read_pixels(
    recipe: VisionRecipe, train: ImageSource, report: Callable[[str], None]
) -> VisionRecipe:
    """Complete a recipe by its training images; says in one line what was chosen.

    Images are as large as the shorter side of most, at most 224 pixels, in patches of 16 or fewer
    pixels, so that at least 4 lie along a side. Raises ValueError as ``with_pixels``.
    """
    images, fields = recipe.data.images, recipe.open_fields()
    if not fields and images in BUILT_IN_IMAGES:
        return recipe
    facts = image_facts(train)
    if fields:
        recipe = _read(recipe, train, facts)
    report(_line(recipe, facts, fields))
    return recipe


def _read(recipe: VisionRecipe, train: ImageSource, facts: ImageFacts) -> VisionRecipe:
    model, data = recipe.model, recipe.data
    size = model.image_size or _image_size(model, facts)
    statistics = data.mean or data.deviation
    channels = model.num_channels or (len(statistics) if statistics else 3 if facts.color else 1)
    if channels not in (1, 3):
        raise InputError(f"data.mean and data.deviation must have 1 or 3 numbers; got {statistics}")
    values: dict[str, Any] = {
        "model.image_size": size,
        "model.patch_size": model.patch_size or _patch_size(size),
        "model.num_channels": channels,
    }
    if data.mean is None or data.deviation is None:
        crop = CenterCrop(share=data.center)
        dataset = ImageDataset(train, size=size, channels=channels, crop=crop)
        values["data.mean"], values["data.deviation"] = mean_and_deviation(dataset)
    return recipe.completed(values)


def _image_size(model: VitSection, facts: ImageFacts) -> int:
    side = min(facts.width, facts.height, _LARGEST)
    if model.patch_size is None:
        return next((size for size in range(side, 0, -1) if _cuts(size)), side)
    if model.patch_size > side:
        raise InputError(
            f"model.patch_size={model.patch_size} is larger than the images, "
            f"{facts.width} x {facts.height}; lower it or set model.image_size"
        )
    return side - side % model.patch_size


def _patch_size(size: int) -> int:
    cuts = _cuts(size)
    if not cuts:
        raise InputError(
            f"model.image_size={size} cannot be cut into {_FEWEST} to {_MOST} patches a side; "
            "set model.patch_size or another size"
        )
    wanted = max(_FEWEST, size / _PATCH)
    return size // min(cuts, key=lambda count: abs(count - wanted))


def _cuts(size: int) -> list[int]:
    """Numbers of patches, of 2 pixels or more, into which a side can be cut."""
    return [n for n in range(_FEWEST, _MOST + 1) if size % n == 0 and size > n]


def _line(recipe: VisionRecipe, facts: ImageFacts, fields: tuple[str, ...]) -> str:
    model, standard = recipe.model, recipe.data.standard
    names = ", ".join(field.partition(".")[2] for field in fields)
    source = f"{names} from {facts.images} training images" if fields else "as the recipe says"
    mean, deviation = (" ".join(map(str, numbers)) for numbers in standard)
    return (
        f"images of {recipe.data.images}: {facts.width} x {facts.height}, {_color(facts.color)}; "
        f"the model reads {model.image_size} x {model.image_size}, "
        f"{_color(model.num_channels == 3)}, in patches of {model.patch_size}; "
        f"mean {mean}, deviation {deviation} ({source})"
    )


def _color(color: bool) -> str:
    return "color" if color else "gray"
