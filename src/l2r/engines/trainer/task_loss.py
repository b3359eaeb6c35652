"""What transformers' Trainer leaves to a loss function: the task loss, its scale, its gradient."""

from typing import Any

from torch import Tensor, nn
from transformers import Trainer

from l2r.errors import InputError
from l2r.routers import Router


def task_loss(
    model: Any, outputs: Any, labels: Tensor | None, num_items_in_batch: Any = None
) -> Tensor:
    """The model's own loss of logits [B, S, V], or cross-entropy of classes for [B, C].

    Raises ValueError for data without labels.
    """
    if labels is None:
        raise InputError("the training data has no labels; the task loss needs them")
    logits = outputs["logits"]
    if logits.dim() == 3:
        loss: Tensor = model.loss_function(
            logits=logits,
            labels=labels,
            vocab_size=logits.shape[-1],
            num_items_in_batch=num_items_in_batch,
            config=getattr(model, "config", None),  # read where tokens are classified
        )
        return loss
    if num_items_in_batch is None:
        return nn.functional.cross_entropy(logits.float(), labels)
    return nn.functional.cross_entropy(logits.float(), labels, reduction="sum") / num_items_in_batch


def micro_batch_share(trainer: Trainer, num_items_in_batch: Any) -> float:
    """Weight of one micro-batch in a mean over the step, given what Trainer does afterwards."""
    share = 1.0 / trainer.current_gradient_accumulation_steps
    # With a loss function Trainer divides by nothing; it multiplies by the number of ranks where
    # the number of items is that of all of them, because DDP then takes the mean.
    if trainer.args.average_tokens_across_devices and num_items_in_batch is not None:
        share /= trainer.accelerator.num_processes // trainer.get_tp_size()
    return share


def check_gradient(model: nn.Module, logits: list[Tensor]) -> None:
    """Raises ValueError where trained routers gave logits that carry no gradient."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    trained = any(p.requires_grad for router in routers for p in router.parameters())
    if trained and not all(layer.requires_grad for layer in logits):
        raise InputError(
            "router outputs carry no gradient, so their losses would be off; activation "
            "checkpointing needs activation_checkpointing_kwargs={'use_reentrant': False}"
        )
