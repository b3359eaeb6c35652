"""Interface between the training loop and a task, and the task of each recipe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from l2r.training.ranks import Ranks
from l2r.training.recipes.load import AnyRecipe
from l2r.training.recipes.vision_schema import VisionRecipe

Batch = dict[str, Tensor]


class Task(Protocol):
    """Data, model and loss of one run. ``unit`` and ``item_size`` say how progress is counted.

    unit: "tokens" or "images". item_size: units per sequence or image. items: items per epoch.
    recipe: with what was left to be read from the data. report: receives lines.
    """

    recipe: Any
    report: Callable[[str], None]
    unit: str
    item_size: int
    items: int

    def build_model(self) -> nn.Module:
        """A freshly initialized model on the CPU."""
        ...

    def micro_batches(self, step: int, ranks: Ranks) -> list[Batch]:
        """This rank's micro-batches of the global batch at ``step``; a pure function of both."""
        ...

    def loss(self, model: nn.Module, batch: Batch, chunk: int | None = None) -> Tensor:
        """Mean task loss of a micro-batch, with its graph; of ``chunk`` tokens at a time."""
        ...

    def validate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Validation numbers by name."""
        ...

    def downstream(self, model: nn.Module) -> dict[str, float]:
        """Accuracies, shares of 1, of ``evaluation.tasks``, and ``mmlu`` and ``overall`` where all
        of it ran; empty without tasks. All ranks call this together and share the work."""
        ...

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the model in Hugging Face format."""
        ...

    def describe(self) -> dict[str, Any]:
        """Facts about the data for environment.json."""
        ...


def build_task(recipe: AnyRecipe, report: Callable[[str], None]) -> Task:
    """The task of a recipe; ``report`` receives a line per slow preparation step."""
    task: Task = task_class(recipe)(recipe, report)
    return task


def task_class(recipe: AnyRecipe) -> Any:
    """Task class of a recipe, imported here: each needs packages that the other does not."""
    if isinstance(recipe, VisionRecipe):
        from l2r.training.vision import VisionTask

        return VisionTask
    from l2r.training.language import LanguageTask

    return LanguageTask
