"""Router losses in transformers' own Trainer and those built on it, as TRL's.

Trainer hands its loss function the model's outputs alone, so the router outputs are captured by
hooks that open with each forward of the whole model and close with it.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from l2r.engines.trainer.router_log import after_training, call_first
from l2r.engines.trainer.task_loss import check_gradient, micro_batch_share, task_loss
from l2r.errors import InputError
from l2r.functional import load_balancing_loss, router_margin_loss, router_z_loss
from l2r.routers import Captured, Router, capture, constrain
from l2r.routers.temporary import removing
from l2r.runs.loss_names import BalanceVariant, ZVariant


def add_router_losses(
    trainer: Trainer,
    *,
    balance: float = 0.01,
    z: float = 0.001,
    balance_variant: BalanceVariant = "paper",
    z_variant: ZVariant = "paper",
    margin: float = 0.0,
    margin_gap: float = 0.1,
) -> "RouterLosses":
    """Make ``trainer`` minimize its task loss + balance * L_bal + z * L_z (Eq. 14).

    ``margin`` > 0 adds that weight times ``router_margin_loss`` with ``gap=margin_gap``, logged as
    ``margin_loss``.

    The router losses of a step are the mean over its micro-batches and over the ranks, whatever
    the accumulation; tokens outside a 2-D ``attention_mask`` do not count. Both are logged
    unweighted, as ``balance_loss`` and ``z_loss``, in every log line of training and to every
    tracker. A ``compute_loss_func`` that the trainer has already stays the task loss; otherwise
    it is the model's own next-token loss, or the cross-entropy of classes. Evaluation reports
    the task loss alone.

    Raises ValueError for a model without our routers, negative weights, or label smoothing.
    While training, ValueError when the weights would have no effect: no router output was
    recorded, it carries no gradient, or the trainer never calls its loss function.
    """
    for name, weight in (("balance", balance), ("z", z), ("margin", margin)):
        if not 0 <= weight < float("inf"):
            raise InputError(f"{name} must be >= 0 and finite; got {name}={weight}")
    if not any(isinstance(module, Router) for module in trainer.model.modules()):
        raise InputError(
            f"{type(trainer.model).__name__} contains no l2r Router; swap its routers first "
            "(l2r.swap_routers)"
        )
    if trainer.label_smoother is not None and trainer.compute_loss_func is None:
        raise InputError(
            "label_smoothing_factor is not applied by Trainer with a loss function; set it to 0"
        )
    losses = RouterLosses(trainer, balance, z, balance_variant, z_variant, margin, margin_gap)
    trainer.compute_loss_func = losses
    call_first(trainer, losses)
    after_training(trainer, losses.stop)
    return losses


@dataclass(eq=False, repr=False)
class RouterLosses(TrainerCallback):
    """Loss function and callback of one Trainer; made by ``add_router_losses``."""

    trainer: Trainer
    balance: float
    z: float
    balance_variant: BalanceVariant
    z_variant: ZVariant
    margin: float
    margin_gap: float

    def __post_init__(self) -> None:
        self.model: nn.Module = self.trainer.model
        self.task_loss = self.trainer.compute_loss_func or partial(task_loss, self.model)
        self._open = ExitStack()
        self._captured: Captured | None = None
        self._mask: Tensor | None = None
        self._sums = torch.zeros(4)  # L_bal, L_z, L_margin and how many micro-batches
        self._called = False
        self._hooks = ExitStack()
        self._watches = False
        self._watch()

    def __call__(
        self, outputs: Any, labels: Tensor | None, num_items_in_batch: Any = None
    ) -> Tensor:
        """Trainer's ``compute_loss_func``: task loss, plus router losses while training."""
        task: Tensor = self.task_loss(outputs, labels, num_items_in_batch=num_items_in_batch)
        captured, self._captured = self._captured, None
        if not self.model.training:
            return task
        self._called = True
        if captured is None or not captured.outputs:
            raise InputError(
                f"the router losses have weights balance={self.balance}, z={self.z}, but no "
                "router output was recorded; DataParallel replicas are not supported"
            )
        logits, indices = captured.logits(), captured.indices()
        check_gradient(self.model, logits)
        mask = self._mask
        bal = load_balancing_loss(logits, indices, variant=self.balance_variant, mask=mask)
        z = router_z_loss(
            logits,
            variant=self.z_variant,
            mask=mask,
            top_k=indices[0].shape[1],
            heads=captured.heads(),
        )
        extra, margin = self.balance * bal + self.z * z, torch.zeros_like(z)
        if self.margin:
            top_k = indices[0].shape[1]
            scores = captured.rankings()
            margin = router_margin_loss(scores, top_k=top_k, gap=self.margin_gap, mask=mask)
            extra = extra + self.margin * margin
        sums = [bal, z, margin, torch.ones_like(z)]
        self._sums += torch.stack([loss.detach() for loss in sums]).float().cpu()
        extra = extra * micro_batch_share(self.trainer, num_items_in_batch)
        return task + extra.to(task.device)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch the forward passes again, in a second training of one Trainer."""
        self._watch()

    def stop(self) -> None:
        """Leave the model without hooks: it can be trained by others."""
        self._close()
        self._hooks.close()
        self._watches = False

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse where a subclass of Trainer computes its loss in another way."""
        if not self._called and (self.balance or self.z or self.margin):
            raise InputError(
                f"{type(self.trainer).__name__} took a step without calling compute_loss_func; "
                "the router losses would be off"
            )
        self._called = False

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Bring constrained router parameters back, as our own loop does after a step."""
        constrain(self.model)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        """Add the means since the last log, over all ranks, to the logs."""
        if "loss" not in logs:
            return
        sums = self.trainer.accelerator.reduce(self._sums.to(args.device), reduction="sum")
        bal, z, margin, count = sums.tolist()
        self._sums.zero_()
        if count:
            losses = {"balance_loss": bal / count, "z_loss": z / count}
            if self.margin:
                losses["margin_loss"] = margin / count
            logs.update(losses)
            state.log_history[-1].update(losses)

    def _watch(self) -> None:
        if not self._watches:
            hooks = (
                self.model.register_forward_pre_hook(self._start, with_kwargs=True),
                self.model.register_forward_hook(self._close, always_call=True),
            )
            self._hooks.enter_context(removing(dict.fromkeys(hooks, self.model)))
            self._watches = True

    def _close(self, *_: Any) -> None:
        self._open.close()

    def _start(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._open.close()  # of a forward whose hook was not called
        mask = kwargs.get("attention_mask")
        self._mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self._captured = self._open.enter_context(capture(module))
