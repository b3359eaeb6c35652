"""One run folder, one recipe, one process (group) at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

from l2r.data.run_folder import RunFolder
from l2r.recipes.load import AnyRecipe, dump_recipe
from l2r.training.ranks import Ranks


def claim(run: RunFolder, recipe: AnyRecipe, ranks: Ranks) -> None:
    """Write the recipe into the folder, or check that the folder's own is the same."""
    text = dump_recipe(recipe)
    if run.recipe.is_file() and run.recipe.read_text(encoding="utf-8") != text:
        raise ValueError(
            f"output folder {run.path} holds a run of another recipe; choose another folder"
        )
    ranks.wait()
    if ranks.first and not run.recipe.is_file():
        run.recipe.write_text(text, encoding="utf-8")


@contextmanager
def lock(run: RunFolder, ranks: Ranks) -> Iterator[None]:
    """Hold the folder: the first rank for all."""
    if not ranks.first:
        yield
        return
    with run.lock():
        yield
