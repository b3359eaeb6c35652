"""A recipe's model without memory, and its sizes, of which time and memory are made."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from l2r.errors import sizes
from l2r.hf.models import forward_flops
from l2r.routers import Router
from l2r_lab.training import transformer_blocks
from l2r_lab.training.recipes import AnyRecipe, VisionRecipe

if TYPE_CHECKING:
    from l2r.hf.models import ModelSize
    from l2r_lab.training.recipes import LanguageRecipe

_IMAGENET = 1_281_167  # training images of ImageNet-1K


def recipe_sizes(folder: str) -> "dict[str, tuple[str, ModelSize]]":
    """Router and size by recipe of a packaged folder. Raises ValueError for an unknown folder."""
    from l2r.hf.models import model_size
    from l2r_lab.training.recipes import load_recipe, recipes_in

    recipes = {name: load_recipe(name) for name in recipes_in(folder)}
    return {
        name: (recipe.router.kind, model_size(meta_model(recipe)))
        for name, recipe in recipes.items()
    }


def meta_model(recipe: "AnyRecipe") -> nn.Module:
    """Make a recipe's model on the meta device. Raises ValueError for sizes that no machine has."""
    with sizes():
        return _MODELS[recipe.task](recipe)


def tokens_per_item(recipe: "AnyRecipe") -> int:
    """Tokens of a sequence, or patches of an image and its class token."""
    if isinstance(recipe, VisionRecipe):
        options = recipe.model_options()
        return int(options["image_size"] // options["patch_size"]) ** 2 + 1
    return recipe.data.sequence_length


def images_per_epoch(recipe: VisionRecipe) -> int | None:
    """Training images of a recipe; None where they are not here and not ImageNet's.

    Raises ValueError for a folder that is here and cannot be read.
    """
    from l2r.images import BUILT_IN_IMAGES, open_images

    images = recipe.data.images
    if images in BUILT_IN_IMAGES or Path(images).expanduser().is_dir():
        return len(open_images(images)[0].labels)
    return _IMAGENET if images == "imagenet" else None


def example_batch(recipe: "AnyRecipe", model: Any, items: int, **options: Any) -> dict[str, Tensor]:
    """Return a micro-batch as the task makes it: empty pixels, or zeros for tokens."""
    if isinstance(recipe, VisionRecipe):
        side, labels = model.config.image_size, model.config.num_labels
        pixels = torch.empty(items, model.config.num_channels, side, side, **options)
        return {"pixel_values": pixels, "targets": torch.empty(items, labels, **options)}
    options["dtype"] = torch.long
    return {"input_ids": torch.zeros(items, recipe.data.sequence_length, **options)}


def _language(recipe: "LanguageRecipe") -> nn.Module:
    from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM, register_experts
    from l2r.text import TokenDataset

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
    from l2r.images import open_images

    classes = recipe.model.num_labels or len(open_images(recipe.data.images)[0].classes)
    config = L2rViTConfig(**recipe.model_options(), num_labels=classes)
    with torch.device("meta"):
        return L2rViTForImageClassification(config)


_MODELS: dict[str, Any] = {"language": _language, "vision": _vision}


@dataclass(frozen=True)
class GatheredPart:
    """Parameters that fsdp2 gathers together. ``shapes``: rows and numbers of each of them."""

    shapes: tuple[tuple[int, int], ...]
    expert_numbers: int = 0

    @property
    def numbers(self) -> int:
        """All of its parameters."""
        return sum(numbers for _, numbers in self.shapes)

    def share(self, ranks: int) -> int:
        """Numbers that the first of ``ranks`` holds: fsdp2 splits rows, and gives it the larger."""
        return sum(-(-rows // ranks) * numbers // rows for rows, numbers in self.shapes)

    def padded(self, ranks: int) -> int:
        """Numbers that travel: every rank's share is as large as the first's."""
        return ranks * self.share(ranks)


@dataclass(frozen=True)
class ModelSizes:
    """Counts of one model. ``tokens``: of one item. ``flops``: of one item's forward, by part.

    blocks, around: parameters of every block and of the rest, which fsdp2 gathers as such.
    vocabulary: words, or labels of which an item has one. half: computed in bf16. loss_chunk:
    tokens whose logits exist at a time, None for all. balanced_over_step: losses.balance_scope.
    """

    language: bool
    half: bool
    averaged: bool
    tokens: int
    hidden: int
    attention_heads: int
    mlp_width: int
    expert_width: int
    experts: int
    top_k: int
    vocabulary: int
    loss_chunk: int | None
    balanced_over_step: bool
    blocks: tuple[GatheredPart, ...]
    around: GatheredPart
    flops: dict[str, float]

    @property
    def numbers(self) -> int:
        """Parameters of the model."""
        return self.around.numbers + sum(block.numbers for block in self.blocks)

    @property
    def expert_numbers(self) -> int:
        """Parameters of all experts."""
        return sum(block.expert_numbers for block in self.blocks)

    @property
    def layers(self) -> int:
        """Blocks."""
        return len(self.blocks)

    @property
    def moe_layers(self) -> int:
        """Blocks with experts."""
        return sum(block.expert_numbers > 0 for block in self.blocks)


def read_sizes(recipe: AnyRecipe) -> ModelSizes:
    """Sizes of the model that a recipe describes, counted on the meta device."""
    model: Any = meta_model(recipe)
    config, layers = model.config, transformer_blocks(model)
    inside = {id(parameter) for block in layers for parameter in block.parameters()}
    experts = [m for name, m in model.named_modules() if name.endswith(".experts")]
    language = recipe.task == "language"
    return ModelSizes(
        language=language,
        half=recipe.training.precision == "bf16",
        averaged=recipe.training.ema_decay > 0,
        tokens=tokens_per_item(recipe),
        hidden=config.hidden_size,
        attention_heads=config.num_attention_heads,
        mlp_width=0 if language else config.intermediate_size,
        expert_width=experts[0].down_proj.shape[-1] if experts else 0,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        vocabulary=config.vocab_size if language else config.num_labels,
        loss_chunk=recipe.training.loss_chunk,
        balanced_over_step=recipe.losses.balance_scope == "step",
        blocks=tuple(_part(block.named_parameters()) for block in layers),
        around=_part((n, p) for n, p in model.named_parameters() if id(p) not in inside),
        flops=_flops(recipe, model),
    )


def _part(parameters: Iterable[tuple[str, nn.Parameter]]) -> GatheredPart:
    named = dict(parameters)
    return GatheredPart(
        shapes=tuple((p.shape[0] if p.dim() else 1, p.numel()) for p in named.values()),
        expert_numbers=sum(p.numel() for name, p in named.items() if ".experts." in name),
    )


def _flops(recipe: AnyRecipe, model: Any) -> dict[str, float]:
    """Count by part; routers by Eq. 29 and 32, which the counter finds.

    A causal mask leaves half of the attention's products, which its kernels do not compute.
    """
    model.set_attn_implementation("eager")  # as matrix products, so that they are counted
    batch = example_batch(recipe, model, 1, device="meta")
    batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in batch.items()}
    batch.pop("targets", None)
    modules, counted = dict(model.named_modules()), forward_flops(model, batch)

    def total(chosen: Callable[[str, nn.Module], bool]) -> float:
        return float(sum(counted[name] for name, m in modules.items() if chosen(name, m)))

    found = {
        "attention": total(lambda name, _: name.endswith((".self_attn", ".attention"))),
        "experts": total(lambda name, _: name.endswith(".experts")),
        "router": total(lambda _, module: isinstance(module, Router)),
        "head": total(lambda name, _: name in ("lm_head", "classifier")),
    }
    found["other"] = counted[""] - sum(found.values())
    if recipe.task == "language":
        linear = total(lambda name, m: ".self_attn." in name and isinstance(m, nn.Linear))
        found["attention"] = (found["attention"] + linear) / 2
    return found
