"""The vision task: ViT on images."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from l2r.errors import InputError, sizes
from l2r.hf.models import L2rViTConfig, L2rViTForImageClassification
from l2r.images import CenterCrop, ImageDataset, ImageLoader, RandomCrop, open_images
from l2r_lab.training.evaluation import evaluate_accuracy
from l2r_lab.training.pixels import read_pixels
from l2r_lab.training.ranks import Ranks
from l2r_lab.training.recipes import VisionRecipe
from l2r_lab.vision import augment


class VisionTask:
    """Images in, cross-entropy of soft targets out."""

    unit = "images"
    item_size = 1

    def __init__(self, recipe: VisionRecipe, report: Callable[[str], None]) -> None:
        self.report = report
        train, validation = open_images(recipe.data.images)
        self.recipe = recipe = read_pixels(recipe, train, report)
        data, model = recipe.data, recipe.model
        if model.num_labels not in (None, len(train.classes)):
            raise InputError(
                f"model.num_labels must be the number of classes of the data, "
                f"{len(train.classes)}, or null; got {model.num_labels}"
            )
        options = recipe.model_options()
        sizes = {"size": options["image_size"], "channels": options["num_channels"]}
        self.train = ImageDataset(
            train,
            **sizes,
            crop=RandomCrop(scale=data.crop_scale, aspect=data.crop_aspect),
            seed=recipe.seed,
        )
        self.validation = ImageDataset(
            validation,
            **sizes,
            crop=CenterCrop(share=data.center),
        )
        self.items = len(self.train)
        self.skipped: set[str] = set()
        self._loader: ImageLoader | None = None

    @property
    def draws_weights(self) -> bool:
        return self.recipe.model.dense is None

    def build_model(self) -> nn.Module:
        config = self.model_config()
        if self.recipe.model.dense is None:
            with sizes():
                return L2rViTForImageClassification(config)
        return L2rViTForImageClassification.from_dense(self.recipe.model.dense, config)

    def model_config(self) -> L2rViTConfig:
        """Model configuration of the recipe with the names of the classes."""
        names = dict(enumerate(self.train.classes))
        return L2rViTConfig(
            **self.recipe.model_options(),
            id2label=names,
            label2id={name: label for label, name in names.items()},
        )

    def micro_batches(self, step: int, ranks: Ranks) -> list[dict[str, Tensor]]:
        training, data = self.recipe.training, self.recipe.data
        if self._loader is None:
            self._loader = ImageLoader(
                self.train,
                batch_size=training.global_batch,
                rank=ranks.rank,
                world_size=ranks.world,
                workers=data.workers,
            )
        batch = self._loader.batch(step)
        self._note(batch.skipped)
        images, targets = augment(
            batch.pixels.to(ranks.device),
            batch.labels.to(ranks.device),
            batch.positions,
            classes=len(self.train.classes),
            **data.augmentation.model_dump(),
            **data.standard._asdict(),
            seed=self.recipe.seed,
        )
        size = training.micro_batch
        parts = zip(torch.split(images, size), torch.split(targets, size), strict=True)
        return [{"pixel_values": x, "targets": y} for x, y in parts]

    @staticmethod
    def loss(model: nn.Module, batch: dict[str, Tensor], chunk: int | None = None) -> Tensor:
        del chunk  # an image has one target
        logits = model(pixel_values=batch["pixel_values"]).logits
        return nn.functional.cross_entropy(logits.float(), batch["targets"])

    def validate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        section = self.recipe.evaluation
        accuracy = evaluate_accuracy(
            model,
            self.validation,
            **self.recipe.data.standard._asdict(),
            batch_size=section.batch_size,
            max_images=section.batch_size * section.max_batches,
            workers=self.recipe.data.workers,
        )
        self._note(accuracy.skipped)
        return {
            "ce": accuracy.loss,
            "top1": accuracy.top1,
            "top5": accuracy.top5,
            "evaluated": accuracy.images,
            "skipped": len(accuracy.skipped),
        }

    def downstream(self, model: nn.Module) -> dict[str, float]:
        return {}  # VisionRecipe refuses tasks

    def export(self, model: nn.Module, folder: Path) -> None:
        model.save_pretrained(folder)  # type: ignore[operator]

    def describe(self) -> dict[str, Any]:
        return {
            "train_images": len(self.train),
            "validation_images": len(self.validation),
            "classes": len(self.train.classes),
            "source": self.recipe.data.images,
        }

    def _note(self, skipped: tuple[str, ...]) -> None:
        """Name every unreadable image once, with the count so far."""
        for name in skipped:
            if name not in self.skipped:
                self.skipped.add(name)
                self.report(f"skipped unreadable image {name} ({len(self.skipped)} so far)")
