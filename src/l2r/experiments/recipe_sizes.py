"""The sizes of the models that recipes describe, counted without memory for their weights."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from l2r.models.size import ModelSize
    from l2r.recipes.load import AnyRecipe
    from l2r.recipes.schema import LanguageRecipe
    from l2r.recipes.vision import VisionRecipe


def recipe_sizes(folder: str) -> "dict[str, tuple[str, ModelSize]]":
    """Router and size by recipe of a packaged folder. Raises ValueError for an unknown folder."""
    from l2r.recipes.load import load_recipe, recipes_in

    recipes = {name: load_recipe(name) for name in recipes_in(folder)}
    return {n: (recipe.router_config().kind, recipe_size(recipe)) for n, recipe in recipes.items()}


def recipe_size(recipe: "AnyRecipe") -> "ModelSize":
    """Build the model of a recipe on the meta device and count it."""
    import torch

    from l2r.models.size import model_size

    build = _MODELS[recipe.task](recipe)
    with torch.device("meta"):
        return model_size(build())


def _language(recipe: "LanguageRecipe") -> Any:
    from l2r.data.tokens import TokenDataset
    from l2r.models import L2rOlmoeConfig, L2rOlmoeForCausalLM

    vocabulary = recipe.data.vocab_size
    if recipe.data.tokens and recipe.model.vocab_size is None:
        tokens: Any = recipe.data.tokens
        vocabulary = TokenDataset(tokens, recipe.data.sequence_length).tokenizer.vocab_size
    config = L2rOlmoeConfig(**recipe.model_options(vocabulary))
    return lambda: L2rOlmoeForCausalLM(config)


def _vision(recipe: "VisionRecipe") -> Any:
    from l2r.data.image_sources import open_images
    from l2r.models import L2rViTConfig, L2rViTForImageClassification

    classes = recipe.model.num_labels or len(open_images(recipe.data.images)[0].classes)
    config = L2rViTConfig(**recipe.model_options(), num_labels=classes)
    return lambda: L2rViTForImageClassification(config)


_MODELS: dict[str, Any] = {"language": _language, "vision": _vision}
