"""One run folder, one recipe, one process (group) at a time; what the run was made of.

SIGTERM and the first SIGINT ask the loop to save and stop; the second SIGINT stops at once.
"""

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn

from l2r.errors import InputError
from l2r.files.atomic import write_text
from l2r.files.folder import RunFolder
from l2r.machine import describe_machine
from l2r.routers import Router
from l2r_lab.training.ranks import Ranks
from l2r_lab.training.recipes import PIXELS, AnyRecipe, VisionRecipe, dump_recipe, load_recipe
from l2r_lab.training.task import Task


def has_recipe(run: RunFolder, recipe: AnyRecipe) -> bool:
    """Tell whether the folder is a run of a recipe that means the same, however it is written.

    A field that did not exist when the run began has its default; one that is read from images is
    as the run read it. Raises ValueError where the folder's recipe cannot be read.
    """
    return run.is_run() and recipe_meaning(load_recipe(str(run.recipe))) == recipe_meaning(
        resumed(run, recipe)
    )


def resumed(run: RunFolder, recipe: AnyRecipe) -> AnyRecipe:
    """Complete the recipe with what the folder's run, if any, has read from the same images.

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


def environment(
    model: nn.Module, recipe: AnyRecipe, data: dict[str, Any], world: int
) -> dict[str, Any]:
    """Content of environment.json for a run on ``world`` ranks; ``data`` are facts of its task."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    return {
        **describe_machine(),
        "command": " ".join(sys.argv),
        "ranks": world,
        "router": recipe.router.kind,
        "parameters": sum(p.numel() for p in model.parameters()),
        "router_parameters": sum(p.numel() for r in routers for p in r.parameters()),
        "linear_router_parameters": sum(r.num_experts * r.hidden_size for r in routers),
        "moe_layers": len(routers),
        "data": data,
    }


def size_note(facts: dict[str, Any]) -> str:
    """Make a line where routers have more parameters than linear ones would; else nothing."""
    own, linear = facts["router_parameters"], facts["linear_router_parameters"]
    if own <= linear:
        return ""
    return (
        f"the routers have {own:,} parameters, more than the {linear:,} of linear routers in "
        "their place"
    )


class StopRequest:
    """Tell whether somebody asked to stop, and which signal it was."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Catch the two signals inside the block; handlers are put back afterwards."""
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number)

    try:
        old = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: signals stay with their owner
        yield request
        return
    try:
        yield request
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
