"""The sizes of a recipe's model that cost and memory are made of."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from l2r.cost.planning.recipe_model import example_batch, meta_model, tokens_per_item
from l2r.hf.models import forward_flops
from l2r.routers import Router
from l2r.training import transformer_blocks
from l2r.training.recipes import AnyRecipe


@dataclass(frozen=True)
class Part:
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
class Sizes:
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
    blocks: tuple[Part, ...]
    around: Part
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


def read_sizes(recipe: AnyRecipe) -> Sizes:
    """Sizes of the model that a recipe describes, counted on the meta device."""
    model: Any = meta_model(recipe)
    config, layers = model.config, transformer_blocks(model)
    inside = {id(parameter) for block in layers for parameter in block.parameters()}
    experts = [m for name, m in model.named_modules() if name.endswith(".experts")]
    language = recipe.task == "language"
    return Sizes(
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


def _part(parameters: Iterable[tuple[str, nn.Parameter]]) -> Part:
    named = dict(parameters)
    return Part(
        shapes=tuple((p.shape[0] if p.dim() else 1, p.numel()) for p in named.values()),
        expert_numbers=sum(p.numel() for name, p in named.items() if ".experts." in name),
    )


def _flops(recipe: AnyRecipe, model: Any) -> dict[str, float]:
    """By part; routers by Eq. 29 and 32, which the counter finds.

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
