"""Which task trains which recipe."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from l2r.recipes.load import AnyRecipe
from l2r.recipes.schema import LanguageRecipe
from l2r.recipes.vision import VisionRecipe
from l2r.training.task import Task


def build_task(recipe: AnyRecipe, report: Callable[[str], None]) -> Task:
    """The task of a recipe; ``report`` receives a line per slow preparation step."""
    return task_class(recipe)(recipe, report)


def task_class(recipe: AnyRecipe) -> Any:
    """The class of a recipe's task, imported now: each needs packages the other can do without."""
    module, name = _TASKS[type(recipe)]
    return getattr(import_module(f"l2r.training.{module}"), name)


_TASKS: dict[type[Any], tuple[str, str]] = {
    LanguageRecipe: ("language", "LanguageTask"),
    VisionRecipe: ("vision", "VisionTask"),
}
