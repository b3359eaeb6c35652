"""Which task class trains which recipe."""

from collections.abc import Callable
from typing import Any

from l2r.recipes.load import AnyRecipe
from l2r.recipes.schema import LanguageRecipe
from l2r.recipes.vision import VisionRecipe
from l2r.training.language import LanguageTask
from l2r.training.task import Task
from l2r.training.vision import VisionTask

_TASKS: dict[type[Any], Callable[..., Task]] = {
    LanguageRecipe: LanguageTask,
    VisionRecipe: VisionTask,
}


def build_task(recipe: AnyRecipe, report: Callable[[str], None]) -> Task:
    """The task of a recipe; ``report`` receives a line per slow preparation step."""
    return _TASKS[type(recipe)](recipe, report)
