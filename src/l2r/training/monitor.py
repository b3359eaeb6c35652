"""Where a run's numbers go: metrics.jsonl, TensorBoard and a progress bar."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from l2r.runs.folder import RunFolder


class Writer(Protocol):
    """The part of TensorBoard's writer that is used."""

    def add_scalar(self, tag: str, value: float, step: int) -> Any:
        """One number."""


class Monitor:
    """Receives records of the first rank; other ranks have none."""

    def __init__(self, run: RunFolder, progress: Progress | None, label: str, steps: int) -> None:
        self.run = run
        self.progress = progress
        self.steps = steps
        self.writer = _tensorboard(run)
        self.bar = None
        if progress is not None:
            self.bar = progress.add_task(label, total=steps, numbers="")

    def record(self, record: dict[str, Any]) -> None:
        """Append to metrics.jsonl and TensorBoard; lists become one curve per layer."""
        self.run.append_metrics(record)
        if self.writer is None:
            return
        for name, value in record.items():
            if isinstance(value, bool | str) or name == "step":
                continue
            values = value if isinstance(value, list) else [value]
            for layer, number in enumerate(values):
                tag = f"{record['kind']}/{name}" + (f"/layer-{layer}" if len(values) > 1 else "")
                self.writer.add_scalar(tag, float(number), record["step"])

    def advance(self, step: int, numbers: str) -> None:
        """Move the progress bar."""
        if self.progress is not None and self.bar is not None:
            self.progress.update(self.bar, completed=step, numbers=numbers)

    def say(self, line: str) -> None:
        """Print one line above the bar."""
        if self.progress is not None:
            self.progress.console.print(line, highlight=False)


@contextmanager
def progress_bar(*, show: bool) -> Iterator[Progress | None]:
    """A bar with loss, speed and time left; plain lines where there is no terminal."""
    if not show:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress


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


def _tensorboard(run: RunFolder) -> Writer | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # optional: metrics.jsonl holds the same numbers
        return None
    return SummaryWriter(str(run.tensorboard))
