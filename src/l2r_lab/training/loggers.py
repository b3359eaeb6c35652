"""Loggers besides metrics.jsonl: TensorBoard, wandb and trackio, given the same numbers by the same
names.

wandb and trackio know a run by a key that its folder keeps, so that a resumed run is one run there.
"""

import importlib.util
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from l2r.files.folder import RunFolder

_PROJECT = "l2r"


def check_logger(name: str) -> None:
    """Raise ModuleNotFoundError for a logger whose package is missing.

    TensorBoard, the default, is left out where it is missing.
    """
    if name in _OPEN and importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(
            f"training.logger={name} needs the package {name}; pip install 'l2r-moe[{name}]'",
            name=name,
        )


class Log:
    """A run's logger; ``say`` gets one line if it fails, and it is told no more from then on.

    Resuming after ``step``: ``known`` are the (kind, step) that the run had on record, of which
    some come again. The numbers are the same, so wandb and trackio are spared them; TensorBoard
    forgets its own, because it may not have stored them all.
    """

    def __init__(
        self,
        name: str,
        run: RunFolder,
        step: int,
        known: set[tuple[str, int]],
        say: Callable[[str], None],
    ) -> None:
        self.name, self.say = name, say
        self.known: set[tuple[str, int]] = set()
        self._logger: Any = None
        if name == "tensorboard":
            self._logger = self._try(lambda: _tensorboard(run, step))
        elif name in _OPEN:
            keys = run.read_json(run.loggers)
            if name in keys:
                self.known = known
            key = keys.setdefault(name, uuid.uuid4().hex[:8])
            run.write_json(run.loggers, keys)
            self._logger = self._try(lambda: _OPEN[name](run, key))

    def record(self, kind: str, step: int, numbers: Mapping[str, Any]) -> None:
        """Log the numbers as KIND/NAME; a list has an entry per layer, KIND/NAME/layer-L."""
        if self._logger is None or (kind, step) in self.known:
            return
        values = {}
        for name, value in numbers.items():
            layers = value if isinstance(value, list) else [value]
            for layer, number in enumerate(layers):
                tag = f"{kind}/{name}" + (f"/layer-{layer}" if len(layers) > 1 else "")
                values[tag] = float(number)
        self._try(lambda: self._logger.log(values, step=step))

    def close(self) -> None:
        """Send what is left."""
        if self._logger is not None:
            self._try(self._logger.finish)
        self._logger = None

    def _try(self, action: Callable[[], Any]) -> Any:
        try:
            with redirect_stdout(sys.stderr):  # trackio prints
                return action()
        except Exception as error:  # of any kind: a network, a disk, a service, an account
            self._logger = None
            reason = " ".join(str(error).split()) or type(error).__name__
            self.say(
                f"warning: {self.name} failed and is told no more ({reason}); the run goes on, "
                "and metrics.jsonl has every number"
            )


class _TensorBoard:
    """An event file with the two methods that the others' runs have.

    Written in the calling thread: torch's SummaryWriter has one of its own, which prints a
    traceback when the disk is full.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}"
        self._file = (folder / f"{name}.{os.getpid()}.{uuid.uuid4().hex[:8]}").open("xb")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        # Readers forget what an earlier process wrote from this step on.
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))
        self._file.flush()

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())

    def log(self, values: Mapping[str, float], *, step: int) -> None:
        for tag, value in values.items():
            number = self._summary.Value(tag=tag, simple_value=value)
            self._write(step=step, summary=self._summary(value=[number]))
        self._file.flush()

    def finish(self) -> None:
        self._file.close()


def _tensorboard(run: RunFolder, step: int) -> _TensorBoard | None:
    if importlib.util.find_spec("tensorboard") is None:
        return None
    return _TensorBoard(run.tensorboard, step + 1)


def _wandb(run: RunFolder, key: str) -> Any:
    import wandb

    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", _PROJECT),
        name=run.name,
        group=run.path.resolve().parent.name,
        id=key,
        resume="allow",
        dir=str(run.path),
        config=run.read_recipe(),
        settings=wandb.Settings(console="off"),  # the progress bar is ours
    )


def _trackio(run: RunFolder, key: str) -> Any:
    import trackio

    trackio.init(
        project=_PROJECT,
        name=f"{run.name}-{key}",  # which is all that it knows a run by
        group=run.path.resolve().parent.name,
        resume="allow",
        config=run.read_recipe(),
    )
    return trackio  # its own finish forgets the run; that of the run says so again at exit


_OPEN: Mapping[str, Callable[[RunFolder, str], Any]] = {"wandb": _wandb, "trackio": _trackio}
