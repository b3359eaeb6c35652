"""Statistics of routers in the logs of transformers' own Trainer and those built on it."""

import math
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from l2r.analysis.diagnostics import RouterStatistics, RouterWatch
from l2r.engines.trainer.heatmap import draw
from l2r.errors import InputError
from l2r.routers.model_calls import ModelCall

_OF_A_STREAM = (
    10  # steps between watched ones where an epoch's end is not known; its line has the last
)


def add_router_statistics(trainer: Trainer, *, every: int | None = None) -> "RouterLog":
    """Make ``trainer`` log what its routers do in every ``every``-th step (default: its log steps).

    Load entropy, max over mean load, dead experts, margin, z-loss and balance loss, per layer and
    as means over layers, go with the loss to every tracker as ``router/NAME/layer-L`` and
    ``router/NAME``; TensorBoard also gets the loads as a picture, layers by experts. The numbers
    are those of the tokens that the step trains on: with a label and no padding, completions in
    TRL's DPO and GRPO, without what a trainer generates. Only steps that are logged cost anything.

    Raises ValueError for a model without a supported router, for a Trainer with ``model_init``, and
    for ``every`` below 1.
    """
    if every is not None and every < 1:
        raise InputError(f"every must be >= 1; got every={every}")
    log = RouterLog(trainer, every)
    call_first(trainer, log)
    after_training(trainer, log.stop)
    return log


def after_training(trainer: Trainer, stop: Callable[[], object]) -> None:
    """Call ``stop`` at the end of every training, also of one that an exception ends.

    ``on_train_end`` is not called then.
    """
    train = trainer.train

    @wraps(train)
    def training(*args: Any, **options: Any) -> Any:
        try:
            return train(*args, **options)
        finally:
            stop()

    trainer.train = training


def model_of(trainer: Trainer) -> nn.Module:
    """Return the model of a Trainer. Raises ValueError where each training makes another."""
    if getattr(trainer, "model_init", None) is not None:
        raise InputError(
            "the Trainer must be given model=, not model_init: each train() would make a model "
            "whose routers nobody watches"
        )
    return trainer.model


def call_first(trainer: Trainer, callback: TrainerCallback) -> None:
    """Put a callback before the trackers', which then find its numbers in the log."""
    trainer.callback_handler.callbacks.insert(0, callback)


@dataclass(eq=False, repr=False)
class RouterLog(TrainerCallback):
    """Callback of one Trainer; made by ``add_router_statistics``."""

    trainer: Trainer
    every: int | None

    def __post_init__(self) -> None:
        self._watch = RouterWatch(model_of(self.trainer))
        self._statistics: RouterStatistics | None = None
        self._completions: Completions | None = None
        trainer: Any = self.trainer
        self._computes: Callable[..., Any] = trainer.compute_loss
        trainer.compute_loss = self._compute_loss

    def _compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the trainer's loss; its inputs say which tokens TRL trains on."""
        self._completions = Completions.of(inputs)
        try:
            return self._computes(model, inputs, *args, **kwargs)
        finally:
            self._completions = None

    def _trained(self, call: ModelCall, tokens: int) -> Tensor | None:
        return None if self._completions is None else self._completions.of_call(call, tokens)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Watch a step that will be logged."""
        first = args.logging_first_step and state.global_step == 0
        every = self.every or _steps_between_logs(args, state, kwargs.get("train_dataloader"))
        if first or (every and (state.global_step + 1) % every == 0):
            wrapped = getattr(self.trainer, "model_wrapped", None)
            self._watch.start(wrapped, self._trained)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reduce what was seen, over all micro-batches and ranks."""
        if self._watch.is_open:
            self._statistics = self._watch.read()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        """Add the numbers of the last watched step to the logs."""
        if "loss" not in logs or self._statistics is None:
            return
        statistics, self._statistics = self._statistics, None
        logs.update(statistics.scalars())
        state.log_history[-1].update(statistics.scalars())
        callbacks = self.trainer.callback_handler.callbacks
        for writer in (getattr(callback, "tb_writer", None) for callback in callbacks):
            draw(writer, statistics, state.global_step)

    def stop(self) -> None:
        """Leave no hook behind."""
        self._watch.stop()


class Completions:
    """Tokens of TRL's batches that are trained on: completions, and no prompts.

    The rows of ``mask`` are read by the calls with gradients in their order, some by each.
    """

    def __init__(self, mask: Tensor) -> None:
        self._mask, self._row = mask.bool(), 0
        self._call: ModelCall | None = None
        self._part = self._mask[:0]

    @classmethod
    def of(cls, inputs: Any) -> "Completions | None":
        """Those of a batch; None where it is none of TRL's."""
        mask = inputs.get("completion_mask") if isinstance(inputs, Mapping) else None
        if not isinstance(mask, Tensor):
            return None
        if isinstance(tools := inputs.get("tool_mask"), Tensor):
            mask = mask * tools
        if isinstance(prompt := inputs.get("prompt_mask"), Tensor):
            mask = torch.cat([torch.zeros_like(prompt), mask], dim=1)
        return cls(mask)

    def of_call(self, call: ModelCall, tokens: int) -> Tensor | None:
        """Those of a call with so many tokens [T]; None where the rows are others."""
        if call is not self._call:
            self._call, first = call, self._row
            self._row += call.rows
            self._part = self._mask[first : self._row]
        return self._part.reshape(-1) if self._part.numel() == tokens else None


def _steps_between_logs(args: Any, state: Any, batches: Any) -> int:
    """Return the steps from one log line to the next; 0 if none is written."""
    if args.logging_strategy == "steps":
        return int(state.logging_steps)
    if args.logging_strategy == "no":
        return 0
    if not isinstance(batches, Sized):
        return _OF_A_STREAM
    return math.ceil(len(batches) / args.gradient_accumulation_steps)
