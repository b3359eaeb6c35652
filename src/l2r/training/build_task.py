"""Which task trains which recipe."""

from collections.abc import Callable
from typing import Any

from l2r.recipes.load import AnyRecipe
from l2r.recipes.schema import LanguageRecipe
from l2r.recipes.vision import VisionRecipe
from l2r.training.task import Task


def build_task(recipe: AnyRecipe, report: Callable[[str], None]) -> Task:
    """The task of a recipe; ``report`` receives a line per slow preparation step."""
    return _TASKS[type(recipe)](recipe, report)


# Imported when built: each task needs packages that the other can do without.
def _language(recipe: LanguageRecipe, report: Callable[[str], None]) -> Task:
    from l2r.training.language import LanguageTask

    return LanguageTask(recipe, report)


def _vision(recipe: VisionRecipe, report: Callable[[str], None]) -> Task:
    from l2r.training.vision import VisionTask

    return VisionTask(recipe, report)


_TASKS: dict[type[Any], Callable[..., Task]] = {LanguageRecipe: _language, VisionRecipe: _vision}
