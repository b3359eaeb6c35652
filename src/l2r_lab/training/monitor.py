"""Places of a run's numbers: metrics.jsonl, a logger and a progress bar."""

import time
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from l2r.files.folder import RunFolder
from l2r.files.wording import printable
from l2r_lab.training.loggers import Log
from l2r_lab.training.ranks import Ranks


class Display(Protocol):
    """Display of bars and lines: rich's Progress here, or that of another process."""

    @property
    def console(self) -> Any:
        """Has ``print(line, highlight=...)``."""

    def add_task(self, description: str, *, total: int, numbers: str) -> Any:
        """Show a new bar; its handle."""

    def update(self, task_id: Any, *, completed: int, numbers: str) -> None:
        """Move a bar."""


class Monitor:
    """Receives the numbers of a run; ``run`` is None on all ranks but the first.

    position: what progress is counted in, tokens or images, and how many of them a step has.
    """

    def __init__(
        self,
        run: RunFolder | None,
        progress: Display,
        label: str,
        steps: int,
        position: tuple[str, int],
    ) -> None:
        self.run = run
        self.progress = progress
        self.position = position
        self.log: Log | None = None
        self.steps = steps
        self.bar = progress.add_task(label, total=steps, numbers="")

    def start(self, step: int, logger: str) -> None:
        """Begin after ``step``; what is on record of later steps will come again."""
        if self.run is not None:
            written = {(record["kind"], record["step"]) for record in self.run.read_metrics()}
            self.run.cut_metrics(step)
            self.log = Log(logger, self.run, step, written, self.say)
        if step:
            self.say(f"resuming from step {step} of {self.steps}")
            self.advance(step, "")

    def record(self, kind: str, step: int, numbers: dict[str, Any]) -> None:
        """Append to metrics.jsonl, and log."""
        if self.run is None or not numbers:
            return
        unit, each = self.position
        numbers = {unit: step * each, **numbers}
        self.run.append_metrics({"kind": kind, "step": step, **numbers})
        if self.log is not None:
            self.log.record(kind, step, numbers)

    def close(self) -> None:
        """Let the logger finish."""
        if self.log is not None:
            self.log.close()

    def advance(self, step: int, numbers: str) -> None:
        """Move the progress bar."""
        self.progress.update(self.bar, completed=step, numbers=numbers)

    def say(self, line: str) -> None:
        """Print one line above the bar."""
        self.progress.console.print(printable(line), highlight=False, markup=False)


def progress_bar(*, show: bool, transient: bool = False) -> Progress:
    """Make a bar with loss, speed and time left; plain lines where there is no terminal.

    transient: leave nothing behind at the end.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[numbers]}", markup=False),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True, quiet=not show)
    return Progress(*columns, console=console, transient=transient, disable=not show)


class Speed:
    """Units per second since the last reading."""

    def __init__(self) -> None:
        self._since = time.perf_counter()
        self._units = 0

    def add(self, units: int) -> None:
        """Count units that are done."""
        self._units += units

    def read(self) -> float:
        """Units per second since the last call."""
        now = time.perf_counter()
        rate = self._units / max(now - self._since, 1e-9)
        self._since, self._units = now, 0
        return rate


class MeanLoss:
    """Sum of the task losses since the last reading; no step waits for the device."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._sum = torch.zeros((), dtype=torch.float64, device=ranks.device)
        self._steps = 0

    def add(self, loss: Tensor) -> None:
        """Return the loss of one step on this rank."""
        self._sum += loss
        self._steps += 1

    def read(self) -> dict[str, float]:
        """``ce``, the mean over steps and ranks, and ``steps``, their number; then start again.

        Empty where no step was added. Every rank must call this.
        """
        if not self._steps:
            return {}
        total, steps = float(self.ranks.sum(self._sum) / self.ranks.world), self._steps
        self._sum.zero_()
        self._steps = 0
        return {"ce": total / steps, "steps": steps}
