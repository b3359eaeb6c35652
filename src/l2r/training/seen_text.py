"""Which corpus a checkpoint was trained on, so that it is measured on the held-out part of it."""

from pathlib import Path

from l2r.runs.folder import RunFolder
from l2r.training.data.corpus import CorpusOptions
from l2r.training.recipes.load import load_recipe
from l2r.training.recipes.schema import LanguageRecipe


def unseen_part(
    checkpoint: str | Path | None, folder: str | Path | None = None
) -> CorpusOptions | None:
    """Corpus of ``folder``, or embedded without one, whose held-out part is new to a checkpoint.

    A run that was trained on this text has its own cut and version. Of other checkpoints: the
    newest embedded corpus, and None for a folder, all of which may be new to them.
    """
    newest = CorpusOptions() if folder is None else None
    run = None if checkpoint is None else _run_of(Path(checkpoint))
    recipe = None if run is None else load_recipe(str(run.recipe))
    if not isinstance(recipe, LanguageRecipe) or recipe.data.tokens:
        return newest
    options = corpus_options(recipe)
    if not _same(options.folder, folder):
        return newest
    # since version 2 the whole hold-out is new to it, whatever cut it was trained on
    return newest if newest and options.version == newest.version else options


def corpus_options(recipe: LanguageRecipe) -> CorpusOptions:
    """The corpus that a recipe without token folders is trained on."""
    data = recipe.data
    return CorpusOptions(
        folder=None if data.corpus == "embedded" else data.corpus,
        vocab_size=data.vocab_size,
        characters_per_domain=data.characters_per_domain,
        version=data.corpus_version,
    )


def _run_of(path: Path) -> RunFolder | None:
    """The run that a path names, or whose ``model/`` or ``model-ema/`` it names."""
    run, above = RunFolder(path), RunFolder(path.parent)
    if run.is_run():
        return run
    return above if above.is_run() and path in (above.model, above.averaged_model) else None


def _same(first: str | None, second: str | Path | None) -> bool:
    if first is None or second is None:
        return first is second
    return Path(first).resolve() == Path(second).resolve()
