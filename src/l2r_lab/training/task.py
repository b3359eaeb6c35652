"""Interface between the training loop and a task, and the task of each recipe."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from l2r_lab.training.ranks import Ranks
from l2r_lab.training.recipes import AnyRecipe, VisionRecipe

Batch = dict[str, Tensor]


class Task(Protocol):
    """Data, model and loss of one run. ``unit`` and ``item_size`` say how progress is counted.

    unit: "tokens" or "images". item_size: units per sequence or image. items: items per epoch.
    recipe: with what was left to be read from the data. report: receives lines. draws_weights:
    whether ``build_model`` draws all weights, so that it can be called under ``torch.device``.
    """

    recipe: Any
    report: Callable[[str], None]
    unit: str
    item_size: int
    items: int

    @property
    def draws_weights(self) -> bool: ...

    def build_model(self) -> nn.Module:
        """Return a freshly initialized model on the CPU."""
        ...

    def micro_batches(self, step: int, ranks: Ranks) -> list[Batch]:
        """Cut this rank's micro-batches of the global batch at ``step``; pure in both."""
        ...

    def loss(self, model: nn.Module, batch: Batch, chunk: int | None = None) -> Tensor:
        """Mean task loss of a micro-batch, with its graph; of ``chunk`` tokens at a time."""
        ...

    def validate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        """Return validation numbers by name."""
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
    """Return the task of a recipe; ``report`` receives a line per slow preparation step."""
    task: Task = task_class(recipe)(recipe, report)
    return task


def task_class(recipe: AnyRecipe) -> Any:
    """Task class of a recipe, imported here: each needs packages that the other does not."""
    if isinstance(recipe, VisionRecipe):
        from l2r_lab.training.vision import VisionTask

        return VisionTask
    from l2r_lab.training.language import LanguageTask

    return LanguageTask
