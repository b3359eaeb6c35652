"""Loss-free balancing of selection biases in transformers' Trainer and those built on it."""

from typing import Any

from transformers import Trainer, TrainerCallback

from l2r.engines.trainer.router_log import after_training, call_first, model_of
from l2r.hf.swap import BiasBalancing, bias_balancing


def add_bias_balancing(trainer: Trainer, speed: float = 0.001) -> "BiasCallback":
    """Make ``trainer`` move the selection biases of its model after each optimizer step.

    See ``l2r.bias_balancing``: every family with a selection bias, loads over the step's
    micro-batches and all ranks. Its numbers go into every log line of training. Call it before
    ``trainer.train``, also before one that resumes: biases are those of the checkpoint then.

    Raises ValueError as ``bias_balancing``, and for a Trainer with ``model_init``.
    """
    callback = BiasCallback(trainer, speed)
    call_first(trainer, callback)
    after_training(trainer, callback.stop)
    return callback


class BiasCallback(TrainerCallback):
    """Callback of one Trainer; made by ``add_bias_balancing``."""

    def __init__(self, trainer: Trainer, speed: float) -> None:
        self._trainer = trainer
        self.balancing: BiasBalancing = bias_balancing(model_of(trainer), speed)
        self.balancing.stop()  # until training begins, with whatever wraps the model there

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count loads, also where the model is compiled."""
        self.balancing.start(getattr(self._trainer, "model_wrapped", self._trainer.model))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the biases."""
        self.balancing.step()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        """Add the numbers of the last step to the logs."""
        if "loss" in logs:
            numbers = self.balancing.numbers()
            logs.update(numbers)
            state.log_history[-1].update(numbers)

    def stop(self) -> None:
        """Leave no hook behind."""
        self.balancing.stop()
