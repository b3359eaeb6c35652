"""Router statistics in Lightning's Trainer.

    Trainer(callbacks=[router_statistics_callback(every=50)])

Lightning is imported by that call alone.
"""

from typing import Any

from torch import nn

from l2r.analysis.diagnostics import RouterWatch
from l2r.engines.trainer.heatmap import draw
from l2r.errors import InputError


def router_statistics_callback(*, every: int = 50) -> Any:
    """Make a Lightning callback that logs what routers do in every ``every``-th training batch.

    The numbers go to all of the Trainer's loggers as ``router/NAME`` and ``router/NAME/layer-L``,
    at the Trainer's ``global_step``; a TensorBoard logger also gets the loads as a picture, layers
    by experts. Batches in between cost nothing. A compiled model is not seen.

    Raises ValueError for ``every`` below 1, and when training starts for a module without a
    supported router; ModuleNotFoundError without Lightning.
    """
    if every < 1:
        raise InputError(f"every must be >= 1; got every={every}")
    from lightning.pytorch.callbacks import Callback

    kind: Any = type("RouterStatisticsCallback", (RouterHooks, Callback), {})
    return kind(every)


class RouterHooks:
    """The hooks of that callback."""

    def __init__(self, every: int) -> None:
        self._every, self._batches = every, 0
        self._watch: RouterWatch | None = None

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Find the routers."""
        self._watch, self._batches = RouterWatch(pl_module), 0

    def on_train_batch_start(
        self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int
    ) -> None:
        """Watch a batch that will be logged."""
        self._batches += 1  # batch_idx begins anew in every epoch
        if self._watch is not None and self._batches % self._every == 0:
            self._watch.start()

    def on_train_batch_end(
        self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the batch that was watched."""
        statistics = self._watch.read() if self._watch is not None and self._watch.is_open else None
        if statistics is None:
            return
        for logger in trainer.loggers:
            logger.log_metrics(statistics.scalars(), step=trainer.global_step)
            if trainer.is_global_zero:
                draw(getattr(logger, "experiment", None), statistics, trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Leave no hook behind."""
        if self._watch is not None:
            self._watch.stop()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Leave no hook behind a training that fails."""
        self.on_train_end(trainer, pl_module)
