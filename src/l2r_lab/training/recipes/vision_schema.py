"""The fields of a vision recipe; defaults are the paper's ViT table."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from l2r.errors import InputError
from l2r.files.shared_settings import OtherThan
from l2r.images import Standard
from l2r_lab.training.recipes.schema import (
    PIXELS,
    Fraction,
    Layers,
    Recipe,
    RecipeSection,
    VisionRouter,
    check_experts,
    default_vision_router,
)

PositiveFraction = Annotated[float, Field(gt=0, le=1)]


class VitSection(RecipeSection):
    """Architecture: ViT-S with experts in the last 4 blocks.

    image_size, patch_size, num_channels: null for what fits the images (l2r_lab.training.pixels).
    moe_layers: blocks with experts, null for the last 4. moe_intermediate_size: width of an
    expert, null for the MLP's. num_labels: null for the classes of the data. dense: folder of a
    dense ViT to start from, every expert a copy of its MLP.
    """

    image_size: PositiveInt | None = None
    patch_size: PositiveInt | None = None
    num_channels: Literal[1, 3] | None = None
    hidden_size: PositiveInt = 384
    num_hidden_layers: Layers = 12
    num_attention_heads: PositiveInt = 6
    intermediate_size: PositiveInt = 1536
    layer_norm_eps: PositiveFloat = 1e-6
    initializer_range: PositiveFloat = 0.02
    moe_layers: list[NonNegativeInt] | None = None
    moe_intermediate_size: PositiveInt | None = None
    num_experts: PositiveInt = 16
    num_experts_per_tok: PositiveInt = 2
    num_labels: Annotated[int, Field(ge=2)] | None = None
    dense: str | None = None

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.image_size is not None and self.patch_size is not None:
            self.check_multiple("image_size", "patch_size")
        self.check_multiple("hidden_size", "num_attention_heads")
        check_experts(self)
        if self.moe_layers == []:
            raise InputError("moe_layers must have at least one block, or be null; got []")
        if any(block >= self.num_hidden_layers for block in self.moe_layers or []):
            raise InputError(
                f"moe_layers must be below num_hidden_layers={self.num_hidden_layers}; "
                f"got {self.moe_layers}"
            )
        return self


class AugmentationSection(RecipeSection):
    """Augmentation of training images; zero switches a step off (l2r_lab.vision.augmentation)."""

    read_with: ClassVar = {"magnitude": {"randaugment": OtherThan(0)}}

    flip: Fraction = 0.5
    randaugment: NonNegativeInt = 2
    magnitude: Annotated[float, Field(ge=0, le=10)] = 9.0
    erasing: Fraction = 0.25
    mixup: Annotated[float, Field(ge=0)] = 0.8
    cutmix: Annotated[float, Field(ge=0)] = 1.0
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1


class ImageSection(RecipeSection):
    """Source of images, and how they are cut.

    images: "digits", "fashion-mnist" or a folder (data/image_sources.py). workers: processes
    that read ahead, 0 to read in the training process; the images are the same either way.
    crop_scale, crop_aspect: random resized crop of training images. center: share of the
    shorter side that evaluation looks at. mean, deviation: of pixels in [0, 1], per channel; null
    for those of the training images.
    """

    images: str = "digits"
    workers: NonNegativeInt = 0
    crop_scale: tuple[PositiveFraction, PositiveFraction] = (0.08, 1.0)
    crop_aspect: tuple[PositiveFloat, PositiveFloat] = (3 / 4, 4 / 3)
    center: PositiveFraction = 0.875
    mean: tuple[float, ...] | None = None
    deviation: tuple[PositiveFloat, ...] | None = None
    augmentation: AugmentationSection = AugmentationSection()

    @property
    def standard(self) -> Standard:
        """Mean and deviation. Raises ValueError where they are still to be read from the images."""
        if self.mean is None or self.deviation is None:
            raise InputError("data.mean and data.deviation are null: read them from the images")
        return Standard(self.mean, self.deviation)

    @model_validator(mode="after")
    def _ranges_ascend(self) -> Self:
        for name in ("crop_scale", "crop_aspect"):
            low, high = getattr(self, name)
            if low > high:
                raise InputError(f"{name} must ascend; got [{low}, {high}]")
        return self


class VisionRecipe(Recipe):
    """Image classifier."""

    task: Literal["vision"]
    model: VitSection = VitSection()
    router: VisionRouter = Field(default_factory=default_vision_router)
    data: ImageSection = ImageSection()

    @model_validator(mode="after")
    def _sections_fit(self) -> Self:
        channels, mean, deviation = self.model.num_channels, self.data.mean, self.data.deviation
        for name, numbers in (("mean", mean), ("deviation", deviation)):
            if None not in (numbers, channels) and len(numbers or ()) != channels:
                raise InputError(
                    f"data.{name} must have model.num_channels={channels} numbers; got {numbers}"
                )
        if mean is not None and deviation is not None and len(mean) != len(deviation):
            raise InputError(
                f"data.mean must have as many numbers as data.deviation; got {mean}, {deviation}"
            )
        mixing = self.data.augmentation.mixup > 0 or self.data.augmentation.cutmix > 0
        if mixing and self.training.micro_batch % 2:
            raise InputError(
                f"training.micro_batch must be even with mixup or cutmix, which pair images; "
                f"got {self.training.micro_batch}"
            )
        if self.evaluation.tasks:
            raise InputError("evaluation.tasks are questions for language models; leave it empty")
        if self.training.tokens is not None:
            raise InputError("training.tokens is for language; give steps or epochs")
        if self.training.loss_chunk is not None:
            raise InputError("training.loss_chunk is for language; leave it out")
        return self

    def open_fields(self) -> tuple[str, ...]:
        """Fields that are to be read from the images, e.g. ``model.image_size``."""
        return tuple(
            f"{section}.{name}"
            for section, names in PIXELS.items()
            for name in names
            if getattr(getattr(self, section), name) is None
        )

    def completed(self, values: Mapping[str, Any]) -> Self:
        """Fill open fields with ``values``. Raises ValueError where they do not fit."""
        whole = self.model_dump()
        for field in self.open_fields():
            section, _, name = field.partition(".")
            whole[section][name] = values[field]
        return type(self).model_validate(whole)

    def model_options(self) -> dict[str, Any]:
        """Keyword arguments of L2rViTConfig, without its labels.

        Raises ValueError where a size is still to be read from the images.
        """
        for name in PIXELS["model"]:
            if getattr(self.model, name) is None:
                raise InputError(f"model.{name} is null: read it from the images")
        options = self.model.model_dump(exclude={"num_labels", "dense"})
        return {**options, "router": self.router}
