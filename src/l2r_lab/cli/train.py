"""``l2r train``: one recipe into one run folder."""

from pathlib import Path
from typing import Annotated

import typer

from l2r.cli.options import RECIPE, Changes, out_option
from l2r.cli.output import echo, say
from l2r.errors import InputError
from l2r_lab.cli.experiment import check_inputs


def train(
    recipe: Annotated[str | None, RECIPE] = None,
    changes: Changes = None,
    out: Annotated[Path | None, out_option("a run folder (default: runs/RECIPE)")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print and exit: the whole recipe.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List packaged recipes.")] = False,
) -> None:
    """Train a recipe into a run folder. The same command resumes an unfinished run.

    Example: l2r train demo/l2r-sips router.rank=8 training.steps=100
    """
    from l2r.files.atomic import check_place
    from l2r_lab.training.recipes import (
        dump_recipe,
        load_recipe,
        recipe_header,
        recipe_names,
        recipe_values,
    )

    if list_:
        for name in recipe_names():
            echo(f"{name:40} {recipe_header(name).splitlines()[0]}")
        return
    if recipe is None:
        raise InputError("RECIPE is missing; l2r train --list shows the packaged ones")
    name = recipe if not recipe.endswith((".yaml", ".yml")) else Path(recipe).stem
    folder = out or Path("runs") / name
    if not show:
        check_place(folder)
        check_inputs(recipe, changes or [])
    loaded = load_recipe(recipe, changes or [])
    if show:
        echo(dump_recipe(loaded), nl=False)
        if "preset" in recipe_values(recipe, changes or []).get("router", {}):
            say("router.preset sets losses.z to 0, unless losses.z is given with it")
        return
    from l2r_lab.training import train as run_training

    result = run_training(loaded, folder, label=name, report=say)
    line = (
        f"trained {result.steps} steps; run folder: {result.folder}"
        if result.finished
        else f"stopped at step {result.step} of {result.steps}, saved; run it again to resume"
    )
    if result.first:
        echo(line)
    if result.finished:
        return
    raise typer.Exit(128 + (result.signal or 0))
