"""The models that recipes describe, without memory for their weights: sizes, and what they eat."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from l2r.errors import sizes
from l2r.training.recipes import VisionRecipe

if TYPE_CHECKING:
    from l2r.hf.models import ModelSize
    from l2r.training.recipes import AnyRecipe, LanguageRecipe


def recipe_sizes(folder: str) -> "dict[str, tuple[str, ModelSize]]":
    """Router and size by recipe of a packaged folder. Raises ValueError for an unknown folder."""
    from l2r.hf.models import model_size
    from l2r.training.recipes import load_recipe, recipes_in

    recipes = {name: load_recipe(name) for name in recipes_in(folder)}
    return {
        name: (recipe.router.kind, model_size(meta_model(recipe)))
        for name, recipe in recipes.items()
    }


def meta_model(recipe: "AnyRecipe") -> nn.Module:
    """The model of a recipe on the meta device. Raises ValueError for sizes that no machine has."""
    with sizes():
        return _MODELS[recipe.task](recipe)


def tokens_per_item(recipe: "AnyRecipe") -> int:
    """Tokens of a sequence, or patches of an image and its class token."""
    if isinstance(recipe, VisionRecipe):
        options = recipe.model_options()
        return int(options["image_size"] // options["patch_size"]) ** 2 + 1
    return recipe.data.sequence_length


def example_batch(recipe: "AnyRecipe", model: Any, items: int, **options: Any) -> dict[str, Tensor]:
    """A micro-batch as the task makes it: empty pixels, or zeros for tokens."""
    if isinstance(recipe, VisionRecipe):
        side, labels = model.config.image_size, model.config.num_labels
        pixels = torch.empty(items, model.config.num_channels, side, side, **options)
        return {"pixel_values": pixels, "targets": torch.empty(items, labels, **options)}
    options["dtype"] = torch.long
    return {"input_ids": torch.zeros(items, recipe.data.sequence_length, **options)}


def _language(recipe: "LanguageRecipe") -> nn.Module:
    from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM, register_experts
    from l2r.training.data import TokenDataset

    vocabulary = recipe.data.vocab_size
    if recipe.data.tokens and recipe.model.vocab_size is None:
        tokens: Any = recipe.data.tokens
        vocabulary = TokenDataset(tokens, recipe.data.sequence_length).tokenizer.vocab_size
    config = L2rOlmoeConfig(**recipe.model_options(vocabulary))
    with torch.device("meta"):
        model = L2rOlmoeForCausalLM(config)
    model.set_experts_implementation(register_experts())
    return model


def _vision(recipe: VisionRecipe) -> nn.Module:
    from l2r.hf.models import L2rViTConfig, L2rViTForImageClassification
    from l2r.training.data import open_images

    classes = recipe.model.num_labels or len(open_images(recipe.data.images)[0].classes)
    config = L2rViTConfig(**recipe.model_options(), num_labels=classes)
    with torch.device("meta"):
        return L2rViTForImageClassification(config)


_MODELS: dict[str, Any] = {"language": _language, "vision": _vision}
