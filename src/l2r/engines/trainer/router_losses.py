"""Router losses in transformers' own Trainer and those built on it, as TRL's.

A trainer computes its loss as it does without us, and we see the model's calls meanwhile. What
the router losses add stands in the backward pass alone, so that no trainer scales it: the loss that
a trainer logs is its own.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from l2r.engines.trainer.own_loss import OwnLossWeights
from l2r.engines.trainer.router_log import after_training, call_first, model_of
from l2r.errors import InputError
from l2r.files.shared_settings import BalanceScope, BalanceVariant, ZVariant
from l2r.routers import Captured, StepLoads, capture, constrain, router_losses, step_loads
from l2r.routers.capture import sites_of
from l2r.routers.losses import check_settings
from l2r.routers.temporary import replaced

_INPUTS = ("input_ids", "inputs_embeds", "pixel_values")


def add_router_losses(
    trainer: Trainer,
    *,
    balance: float = 0.01,
    z: float = 0.0,
    balance_variant: BalanceVariant = "paper",
    balance_scope: BalanceScope = "microbatch",
    z_variant: ZVariant = "paper",
    margin: float = 0.0,
    margin_gap: float = 0.1,
    keep_own_loss: bool = False,
) -> "RouterLosses":
    """Make ``trainer`` minimize its task loss + balance * L_bal + z * L_z (Eq. 14).

    ``trainer`` is transformers' Trainer or one built on it (TRL's SFT, DPO, GRPO), its model has
    routers of ours, swapped ones, or those of a supported family. The losses and their settings are
    those of ``l2r.routers.router_losses``; ``margin`` > 0 adds the margin loss, logged as
    ``margin_loss``. z is 0 unless asked for: L2R's tuned settings were found without it, the
    paper's weight is 0.001.

    The router losses of a step are the mean over its micro-batches and over the ranks, whatever
    the accumulation. ``balance_scope="step"`` counts loads over all of them in a forward pass of
    its own before the step, where it has several micro-batches. Losses are logged unweighted, as
    ``balance_loss`` and ``z_loss``, in every log line of training; ``loss`` and evaluation are
    the task loss alone. The balance loss that the model or TRL adds by itself is off meanwhile;
    ``keep_own_loss`` leaves it.

    Raises ValueError for a model without a supported router, for a Trainer with ``model_init``, and
    for settings that mean nothing.
    While training, ValueError when the weights would have no effect: no router output was
    recorded, it carries no gradient, or the trainer never comes to ``accelerator.backward``.
    """
    check_settings(
        balance=balance, z=z, margin=margin, variant=balance_variant, scope=balance_scope
    )
    sites_of(trainer.model)
    settings = {
        "balance": balance, "z": z, "margin": margin, "margin_gap": margin_gap,
        "balance_variant": balance_variant, "balance_scope": balance_scope, "z_variant": z_variant,
    }  # fmt: skip
    losses = RouterLosses(trainer, settings, keep_own_loss)
    call_first(trainer, losses)
    after_training(trainer, losses.stop)
    return losses


@dataclass(eq=False, repr=False)
class RouterLosses(TrainerCallback):
    """Losses of one Trainer, around its methods; made by ``add_router_losses``."""

    trainer: Trainer
    settings: dict[str, Any]
    keep_own_loss: bool

    def __post_init__(self) -> None:
        trainer: Any = self.trainer
        self.model = model_of(trainer)
        self._own = OwnLossWeights(trainer, self.model)
        self._sums = torch.zeros(4)  # L_bal, L_z, L_margin, micro-batches
        self._captured: Captured | None = None
        self._training = False
        self._batches: list[Any] = []  # micro-batches of the step, where its loads are counted
        self._loads: StepLoads | None = None
        self._computes: Callable[..., Any] = trainer.compute_loss
        self._steps: Callable[..., Any] = trainer.training_step
        self._collects: Callable[..., Any] = trainer.get_batch_samples
        trainer.compute_loss = self._compute_loss
        trainer.training_step = self._training_step
        trainer.get_batch_samples = self._batch_samples

    @property
    def _has_weights(self) -> bool:
        return any(self.settings[name] for name in ("balance", "z", "margin"))

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
        self._sums = torch.zeros_like(self._sums)
        if count:
            losses = {"balance_loss": bal / count, "z_loss": z / count}
            if self.settings["margin"]:
                losses["margin_loss"] = margin / count
            logs.update(losses)
            state.log_history[-1].update(losses)

    def stop(self) -> None:
        """Forget the step that an exception ended, and what no line of the log had yet."""
        self._captured, self._training, self._batches, self._loads = None, False, [], None
        self._sums = torch.zeros(4)

    def _compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Compute the trainer's loss, the model's balance loss off and its routers captured."""
        with ExitStack() as open_blocks:
            if not self.keep_own_loss:
                open_blocks.enter_context(self._own.off())
            if self._training and torch.is_grad_enabled():
                self._captured = open_blocks.enter_context(capture(model))
            return self._computes(model, *args, **kwargs)

    def _training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the trainer's step, whose backward pass gets the router losses too."""
        trainer: Any = self.trainer
        accelerator, reached = trainer.accelerator, []
        if self._batches:
            self._loads, self._batches = self._count_loads(model), []

        def backward(loss: Tensor, *rest: Any, **options: Any) -> None:
            reached.append(True)
            extra = self._extra() / trainer.current_gradient_accumulation_steps
            plain(loss + extra.to(loss.device, loss.dtype), *rest, **options)

        plain = accelerator.backward
        self._training = True
        try:
            with replaced({(accelerator, "backward"): backward}):
                result = self._steps(model, *args, **kwargs)
        finally:
            self._training, self._captured = False, None
        if not reached and self._has_weights:
            raise InputError(
                f"{type(trainer).__name__} took a step without calling accelerator.backward; the "
                "router losses would be off"
            )
        return result

    def _extra(self) -> Tensor:
        """Weighted router losses of a micro-batch; notes the unweighted ones."""
        captured, self._captured = self._captured, None
        if captured is None or not captured.outputs:
            weights = ", ".join(f"{name}={self.settings[name]}" for name in ("balance", "z"))
            raise InputError(
                f"the router losses have weights {weights}, but no router output was recorded"
            )
        found = router_losses(captured, **self.settings, loads=self._loads)
        values = torch.stack([*found[1:], torch.ones_like(found.z)])
        self._sums = self._sums.to(values.device) + values
        return found.total

    def _batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Collect the trainer's micro-batches, and keep them if a step's loads are counted."""
        found = self._collects(*args, **kwargs)
        self._loads = None
        counted = self.settings["balance_scope"] == "step" and self.settings["balance"]
        self._batches = list(found[0]) if counted and len(found[0]) > 1 else []
        return found

    def _count_loads(self, model: Any) -> StepLoads:
        """Count the step's loads, by a forward of each micro-batch that draws as the next will."""
        trainer: Any = self.trainer
        batches = [trainer._prepare_inputs(batch) for batch in self._batches if _is_input(batch)]
        if len(batches) < len(self._batches):
            raise InputError(
                f"balance_scope='step' must see the micro-batches before the step, and "
                f"{type(trainer).__name__} makes them in it; use gradient_accumulation_steps=1 "
                "or another scope"
            )
        model.train()
        devices = [torch.device(trainer.args.device)] if trainer.args.device.type == "cuda" else []
        first = self.settings["balance_variant"] == "tutel"
        with torch.no_grad(), torch.random.fork_rng(devices), step_loads(
            model, first_choice=first
        ) as loads:  # fmt: skip
            for batch in batches:
                with trainer.compute_loss_context_manager():
                    model(**{name: v for name, v in batch.items() if name in self._accepted})
        loads.micro_batches = len(batches)
        return loads

    @property
    def _accepted(self) -> set[str]:
        """Names of what the model is called with, but for labels; an adapter around it has none."""
        inner: Any = getattr(self.model, "get_base_model", lambda: self.model)()
        return set(inspect.signature(inner.forward).parameters) - {"labels"}


def _is_input(batch: Any) -> bool:
    return isinstance(batch, Mapping) and any(name in batch for name in _INPUTS)
