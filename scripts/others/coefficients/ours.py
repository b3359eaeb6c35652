"""What ``add_router_losses`` adds to the gradient of router weights, in transformers' Trainer."""

import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from l2r import build_router
from l2r.engines.trainer import add_router_losses
from l2r.routers import RouterConfig, capture, router_losses
from scripts.others.coefficients.batch import COEFFICIENT, Added


class Gates(nn.Module):
    """Our routers alone, one a layer, over the same inputs; without a task.

    kind: ``linear`` or ``sigmoid``.
    """

    def __init__(self, weights: Tensor, top_k: int, kind: str) -> None:
        super().__init__()
        config = RouterConfig.from_dict({"kind": kind})
        experts, width = weights.shape[1:]
        self.gates = nn.ModuleList(
            build_router(config, hidden_size=width, num_experts=experts, top_k=top_k)
            for _ in weights
        )
        with torch.no_grad():
            for parameter, weight in zip(self.weights(), weights, strict=True):
                parameter.copy_(weight)

    def weights(self) -> list[nn.Parameter]:
        """Weights [N, D] of the layers."""
        return [gate.get_parameter("weight") for gate in self.gates]

    def forward(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Run the routers; the loss is 0."""
        nothing = [gate(inputs_embeds).weights.sum() * 0 for gate in self.gates]
        return {"loss": torch.stack(nothing).sum()}


class _Gradients(TrainerCallback):
    """Keeps the gradients of a step."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self.found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def one_step(
    model: nn.Module,
    rows: list[dict[str, Tensor]],
    *,
    micro_batches: int = 1,
    losses: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Gradients by name of one step of Trainer over ``rows``.

    ``losses`` are settings of ``add_router_losses``; None leaves the model's own.
    """
    watch = _Gradients()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=len(rows) // micro_batches,
            gradient_accumulation_steps=micro_batches,
            max_steps=1,
            max_grad_norm=0.0,
            logging_steps=1,
            remove_unused_columns=False,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            dataloader_pin_memory=False,
            **options,
        )
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[watch])
        trainer.remove_callback(PrinterCallback)
        if losses is not None:
            add_router_losses(trainer, **losses)
        trainer.train()
    return watch.found


def ours(
    x: Tensor,
    weights: Tensor,
    top_k: int,
    mask: Tensor | None = None,
    *,
    balance: float = COEFFICIENT,
    positions: Tensor | None = None,
    router: str = "linear",
    **settings: Any,
) -> Added:
    """What ``router_losses(captured, balance=..., **settings)`` adds."""
    gates = Gates(weights, top_k, router)
    with capture(gates) as captured:
        gates(inputs_embeds=x, attention_mask=mask, position_ids=positions)
    total = router_losses(captured, balance=balance, **settings).total
    return Added(float(total.detach()), torch.stack(torch.autograd.grad(total, gates.weights())))


def trained(
    x: Tensor,
    weights: Tensor,
    top_k: int,
    *,
    balance: float = COEFFICIENT,
    micro_batches: int = 1,
    router: str = "linear",
    **settings: Any,
) -> Tensor:
    """Gradient of a step of Trainer with ``add_router_losses(trainer, balance, **settings)``."""
    rows = [{"inputs_embeds": row} for row in x]
    losses = {"balance": balance, **settings}
    gates = Gates(weights, top_k, router)
    found = one_step(gates, rows, micro_batches=micro_batches, losses=losses)
    return torch.stack([found[f"gates.{layer}.weight"] for layer in range(len(weights))])
