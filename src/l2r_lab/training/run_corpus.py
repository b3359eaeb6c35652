"""Corpus and images of a run, read from its recipe."""

from l2r.errors import InputError
from l2r.files.folder import RunFolder
from l2r.images import Preparation
from l2r.text import CorpusOptions
from l2r_lab.training.recipes import ImageSection, LanguageRecipe, VisionRecipe, load_recipe


def corpus_of_run(run: RunFolder) -> CorpusOptions | None:
    """Corpus that a language run was trained on; None for token files and for images."""
    recipe = load_recipe(str(run.recipe))
    if not isinstance(recipe, LanguageRecipe) or recipe.data.tokens:
        return None
    return corpus_options(recipe)


def corpus_options(recipe: LanguageRecipe) -> CorpusOptions:
    """Corpus that a recipe without token folders is trained on."""
    data = recipe.data
    return CorpusOptions(
        folder=None if data.corpus == "embedded" else data.corpus,
        vocab_size=data.vocab_size,
        characters_per_domain=data.characters_per_domain,
        version=data.corpus_version,
    )


def images_of_run(run: RunFolder) -> Preparation:
    """Images that a vision run validates on, as its model wants them.

    Raises ValueError for a run of a language model.
    """
    recipe = load_recipe(str(run.recipe))
    if not isinstance(recipe, VisionRecipe):
        raise InputError(f"{run.path} is a run of a language model; it takes no images")
    return preparation(recipe.data)


def preparation(section: ImageSection) -> Preparation:
    """Return preparation of images that a recipe's section ``data`` asks for."""
    return Preparation(section.standard, section.images, section.center)
