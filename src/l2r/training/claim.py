"""One run folder, one recipe, one process (group) at a time."""

from collections.abc import Mapping
from typing import Any

from l2r.errors import InputError
from l2r.runs.atomic import write_text
from l2r.runs.folder import RunFolder
from l2r.training.ranks import Ranks
from l2r.training.recipes.changes import PIXELS
from l2r.training.recipes.load import AnyRecipe, dump_recipe, load_recipe
from l2r.training.recipes.vision_schema import VisionRecipe
from l2r.training.task import Task


def has_recipe(run: RunFolder, recipe: AnyRecipe) -> bool:
    """Whether the folder is a run of a recipe that means the same, however it was written down.

    A field that did not exist when the run began has its default; one that is read from images is
    as the run read it. Raises ValueError where the folder's recipe cannot be read.
    """
    return run.is_run() and recipe_meaning(load_recipe(str(run.recipe))) == recipe_meaning(
        resumed(run, recipe)
    )


def resumed(run: RunFolder, recipe: AnyRecipe) -> AnyRecipe:
    """The recipe with what the run in the folder, if there is one, has read from the same images.

    Raises ValueError where the folder's recipe cannot be read.
    """
    if not isinstance(recipe, VisionRecipe) or not recipe.open_fields() or not run.is_run():
        return recipe
    own = load_recipe(str(run.recipe))
    if not isinstance(own, VisionRecipe) or own.data.images != recipe.data.images:
        return recipe
    values = {
        f"{section}.{name}": getattr(getattr(own, section), name)
        for section, names in PIXELS.items()
        for name in names
    }
    try:
        return recipe.completed(values)
    except ValueError:  # what is set does not fit: a recipe of other values
        return recipe


def claim_run(run: RunFolder, recipe: AnyRecipe, ranks: Ranks, task: Task | None = None) -> None:
    """Write the recipe into the folder, or check that the folder's own is the same.

    Raises as ``check_claim`` does.
    """
    check_claim(run, recipe, task)
    ranks.wait()
    if ranks.first and not run.is_run():
        write_text(run.recipe, dump_recipe(recipe))


def check_claim(run: RunFolder, recipe: AnyRecipe, task: Task | None = None) -> None:
    """Raise ValueError where the folder is a run of another recipe, or began on other text."""
    if run.is_run() and not has_recipe(run, recipe):
        own = recipe_meaning(load_recipe(str(run.recipe)))
        fields = differing_fields(own, recipe_meaning(resumed(run, recipe)))
        raise InputError(
            f"output folder {run.path} holds a run of another recipe: {fields}; "
            "choose another folder"
        )
    if run.is_run() and task is not None:
        check_text(run, task)


def check_text(run: RunFolder, task: Task) -> None:
    """Raise ValueError where a run began on other text than its task reads now.

    Runs of images, and of versions before 0.3, do not note what they read.
    """
    data = run.read_json(run.environment).get("data")
    began = data.get("text_sha256") if isinstance(data, dict) else None
    if began not in (None, task.describe().get("text_sha256")):
        section = task.recipe.data
        raise InputError(
            f"the text of run {run.path} ({', '.join(section.tokens) or section.corpus}) has "
            f"changed since the run began; put it and the packages that made its tokens back as "
            f"they were, or train into another folder"
        )


def recipe_meaning(recipe: AnyRecipe) -> dict[str, Any]:
    """All fields that training depends on."""
    return recipe.model_dump(exclude={"training": {"logger"}})


def differing_fields(own: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """First field that differs between two recipes, with both values and the number of others.

    For example ``its training.steps is 6, not 12 (1 more differs)``.
    """
    mine, theirs = _by_field(own), _by_field(other)
    pairs = {name: (mine.get(name, "unset"), theirs.get(name, "unset")) for name in mine | theirs}
    name, *others = [name for name, (value, wanted) in pairs.items() if value != wanted]
    more = f" ({len(others)} more differ{'s' * (len(others) == 1)})" if others else ""
    return f"its {name} is {pairs[name][0]}, not {pairs[name][1]}{more}"


def _by_field(values: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Nested sections as ``section.field``."""
    fields: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, Mapping) and value
        fields |= _by_field(value, f"{place}{name}.") if nested else {f"{place}{name}": value}
    return fields
