"""What transformers' models add: their own callers of the balance loss, and Trainer's scaling."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import MoeModelOutputWithPast

from scripts.others.coefficients.batch import COEFFICIENT, Added, Balance, logits_of
from scripts.others.coefficients.measure import Loss
from scripts.others.coefficients.ours import one_step, ours, trained
from scripts.others.coefficients.references import gshard, over_k, pooled, sequence, switch

FAMILIES = {
    "Mixtral": ("Mixtral", "num_local_experts"),
    "OLMoE": ("Olmoe", "num_experts"),
    "Qwen3-MoE": ("Qwen3Moe", "num_experts"),
}
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 20,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def small(family: str, *, layers: int, experts: int, top_k: int) -> Any:
    """A small stock model, seeded, whose balance loss has the coefficient 0.01."""
    prefix, name = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(
        **SIZES,
        num_hidden_layers=layers,
        num_experts_per_tok=top_k,
        output_router_logits=True,
        router_aux_loss_coef=COEFFICIENT,
        **{name: experts},
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{prefix}ForCausalLM")(config)


class _Logits(nn.Module):
    """In place of a model's layers: router logits of given inputs, and hidden states of 0."""

    def __init__(self, weights: Tensor, width: int) -> None:
        super().__init__()
        self.weights, self.width = nn.Parameter(weights.clone()), width

    def forward(self, inputs_embeds: Tensor, **kwargs: Any) -> MoeModelOutputWithPast:
        """Return what the head and the balance loss get."""
        layers = logits_of(inputs_embeds, self.weights)
        return MoeModelOutputWithPast(
            last_hidden_state=inputs_embeds.new_zeros(*inputs_embeds.shape[:2], self.width),
            router_logits=tuple(layer.flatten(0, 1) for layer in layers),
        )


def with_logits(family: str, weights: Tensor, top_k: int) -> Any:
    """A stock model whose own forward gets the router logits of ``weights`` [L, N, D]."""
    layers, experts = weights.shape[:2]
    model = small(family, layers=layers, experts=experts, top_k=top_k)
    model.model = _Logits(weights, SIZES["hidden_size"])
    return model


def stock(family: str) -> Balance:
    """What a family's forward adds to the loss of its task."""

    def balance(x: Tensor, weights: Tensor, top_k: int, mask: Tensor | None) -> Added:
        model = with_logits(family, weights, top_k)
        labels = torch.zeros(x.shape[:2], dtype=torch.int64)
        # in float64 the difference of two losses of order one is the value
        found = model.double()(
            inputs_embeds=x.double(), attention_mask=mask if mask is None else mask.long(),
            labels=labels,
        )  # fmt: skip
        task = model.loss_function(found.logits, labels, vocab_size=SIZES["vocab_size"])
        float32 = with_logits(family, weights, top_k)
        float32(
            inputs_embeds=x, attention_mask=mask if mask is None else mask.long(), labels=labels
        ).loss.backward()
        return Added(float((found.loss - task).detach()), float32.model.weights.grad)

    return balance


def stock_trained(family: str) -> Callable[[Tensor, Tensor, int], Tensor]:
    """The gradient of a step of Trainer, every row a micro-batch."""

    def gradient(x: Tensor, weights: Tensor, top_k: int) -> Tensor:
        labels = torch.zeros(x.shape[1], dtype=torch.int64)
        rows = [{"inputs_embeds": row, "labels": labels} for row in x]
        model = with_logits(family, weights, top_k)
        return one_step(model, rows, micro_batches=len(rows))["model.weights"]

    return gradient


def own_losses() -> list[Loss]:
    """Ours, by variant and scope."""

    def loss(name: str, reference: Any, factor: str, here: dict[str, Any], **own: Any) -> Loss:
        def balance(x: Tensor, weights: Tensor, top_k: int, mask: Tensor | None) -> Added:
            return ours(x, weights, top_k, mask, **own)

        def micro_batches(x: Tensor, weights: Tensor, top_k: int) -> Tensor:
            return trained(x, weights, top_k, micro_batches=len(x), **own)

        def packed(x: Tensor, weights: Tensor, top_k: int) -> Added:
            positions = torch.arange(x.shape[1]).repeat(len(x))[None]
            return ours(x.reshape(1, -1, x.shape[-1]), weights, top_k, positions=positions, **own)

        return Loss(
            name, balance, reference, factor, here, micro_batches=micro_batches,
            packed=packed if own.get("balance_scope") == "sequence" else None,
        )  # fmt: skip

    tutel, hf = {"balance_variant": "tutel"}, {"balance_variant": "hf"}
    scope = {"balance_scope": "sequence"}
    return [
        loss("ours: by default", switch, "1", {}),
        loss('ours: `balance_variant="olmoe"`', over_k, "1 / k", {}, balance_variant="olmoe"),
        loss('ours: `balance_variant="hf"`', pooled, "1", hf, **hf),
        loss('ours: `balance_variant="tutel"`', gshard, "1", tutel, **tutel),
        loss('ours: `balance_scope="step"`', switch, "1", {}, balance_scope="step"),
        loss('ours: `balance_scope="sequence"`', sequence, "1", scope, **scope),
    ]


def stock_losses() -> list[Loss]:
    """Those of transformers' families."""
    here = {"balance_variant": "hf"}
    return [
        Loss(
            f"transformers: {family}",
            stock(family),
            pooled,
            "1",
            here,
            micro_batches=stock_trained(family),
        )
        for family in FAMILIES
    ]
