"""A run is a folder; this file is its schema. Training writes it, everything else reads it.

recipe.yaml          every field of the recipe, written out
environment.json     versions, hardware, command, sizes of the model, a checksum of its text
metrics.jsonl        one JSON object a line, ``kind`` train (one step), train_mean (all since the
                     last one), validation or tasks; null is a number that is not finite
checkpoints/step-N/  safetensors shards and state.json, complete when the name has no dot
model/               Hugging Face export of the final weights, with tokenizer and model card
model-ema/           the same of their moving average, where the recipe keeps one
diagnosis.json       what the routers do on validation data, with diagnosis.safetensors (compare
                     and sweep)
text.npz             which tokens of held-out text go to which expert (language)
patches.npz          which patches of some images go to which expert (vision)
evaluation.json      downstream results, or accuracy on images (eval)
evaluation/          TASK.json, its result; TASK.documents.jsonl, every document's scores and hit
tensorboard/         the same numbers as metrics.jsonl; wandb/ where that is the logger
loggers.json         logger -> what it calls this run, of wandb and trackio
"""

import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from l2r.errors import InputError, PathError, using
from l2r.files.atomic import (
    append_text,
    plain_json,
    refuse_link,
    remove_unfinished,
    try_lock,
    write_json,
    write_text,
)
from l2r.files.reading import parse_json, read_json, read_yaml, refuse_endless

_SINGLE = ("tokens", "ce", "ce/mean", "top1", "balance")  # fields of a record that are one number
_LONGEST = 1 << 24  # bytes of a line of metrics.jsonl, far above any record
SEED_MARK = ".seed-"  # and the seed, in the name of a run that repeats another


class RunFolder:
    """Paths and small files of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.model = self.path / "model"
        self.averaged_model = self.path / "model-ema"
        self.text = self.path / "text.npz"
        self.patches = self.path / "patches.npz"
        self.evaluation = self.path / "evaluation.json"
        self.tensorboard = self.path / "tensorboard"
        self.loggers = self.path / "loggers.json"
        self.folders = (
            self.checkpoints,
            self.model,
            self.averaged_model,
            self.tensorboard,
            *(self.path / name for name in ("evaluation", "wandb")),
        )
        self._parsed: tuple[tuple[int, int], list[dict[str, Any]]] = ((0, 0), [])

    @property
    def name(self) -> str:
        """Last part of the path: how reports call the run."""
        return self.path.name

    def create(self) -> None:
        """Make the folder.

        Raises OSError, naming the path, when that is not possible, and ValueError where a folder
        that a run has is a link; the run folder itself may be one.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.path):
                pass
        except OSError as error:
            raise PathError(
                f"cannot write to output folder {self.path}: {error.strerror}"
            ) from error
        for folder in self.folders:
            refuse_link(folder)

    def read_recipe(self) -> dict[str, Any]:
        """Fields of the recipe as plain values. Raises ValueError where it cannot be read."""
        return read_yaml(self.recipe)

    def read_training(self, field: str) -> Any:
        """Read a field of the recipe's section ``training``; None without it or a recipe."""
        section = self.read_recipe().get("training") if self.is_run() else None
        return section.get(field) if isinstance(section, dict) else None

    def planned_steps(self) -> int | None:
        """Read the steps that the run is to have, if the environment or the recipe gives them."""
        steps = self.read_json(self.environment).get("steps") or self.read_training("steps")
        return steps if isinstance(steps, int) else None

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder for one process. Raises ValueError when another run holds it."""
        with try_lock(self.path / ".lock") as mine:
            if not mine:
                raise InputError(f"output folder {self.path} is in use by another run")
            remove_unfinished(self.path)
            if not self.checkpoints.is_symlink():
                remove_unfinished(self.checkpoints)
            yield

    def read_metrics(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Read metrics.jsonl in order, up to a line that a crash cut or damaged; null is NaN.

        The file is parsed again only after it has changed. Records are not to be changed.
        """
        version = self._version()
        if self._parsed[0] != version:
            self._parsed = (version, self._parse_metrics() if any(version) else [])
        return [r for r in self._parsed[1] if kind is None or r.get("kind") == kind]

    def changes(self, interval: float) -> Iterator[None]:
        """Yield at once and at every change of the records, until the run is finished.

        Looks every ``interval`` seconds.
        """
        seen = None
        while not self.is_finished():
            version = self._version()
            if version != seen:
                seen = version
                yield
            time.sleep(interval)

    def _version(self) -> tuple[int, int]:
        """Time and size of metrics.jsonl, zeros while there is none."""
        if not self.metrics.is_file():
            return 0, 0
        with using(self.metrics):
            facts = self.metrics.stat()
        return facts.st_mtime_ns, facts.st_size

    def _parse_metrics(self) -> list[dict[str, Any]]:
        records = []
        refuse_endless(self.metrics)
        with using(self.metrics), self.metrics.open("rb") as stream:
            while line := stream.readline(_LONGEST):
                try:
                    record = parse_json(line, strict=False)
                except ValueError:
                    break
                if not _is_record(record):
                    break
                records.append({name: _number(value) for name, value in record.items()})
        return records

    def cut_metrics(self, step: int) -> None:
        """Drop records after ``step``: a resumed run writes them again."""
        lines = [_line(record) for record in self.read_metrics() if record["step"] <= step]
        write_text(self.metrics, "".join(lines))

    def append_metrics(self, record: dict[str, Any]) -> None:
        """Add one record and hand it to the operating system; null is what is not finite."""
        append_text(self.metrics, _line(record))

    def read_json(self, path: Path) -> dict[str, Any]:
        """Read a JSON file of the run, or an empty dictionary if there is none."""
        return read_json(path, strict=False) if path.is_file() else {}

    def write_json(self, path: Path, value: Any) -> None:
        """Write a JSON file whole or not at all."""
        write_json(path, value)

    def complete_checkpoints(self) -> list[Path]:
        """Finished checkpoints, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        folders = [p for p in self.checkpoints.iterdir() if p.name.startswith("step-")]
        return sorted(p for p in folders if (p / "state.json").is_file())

    def is_finished(self) -> bool:
        """Tell whether the final weights are there, and their average if the recipe keeps one."""
        exports = [self.model]
        if self.read_training("ema_decay"):
            exports.append(self.averaged_model)
        return all((folder / "config.json").is_file() for folder in exports)

    def is_run(self) -> bool:
        """Tell whether the folder looks like a run: quantizers leave a recipe.yaml too."""
        return self.recipe.is_file() and not (self.path / "config.json").is_file()


def _is_record(record: dict[str, Any]) -> bool:
    """Tell whether it has a step and a kind, and else numbers or lists of numbers.

    Losses and accuracies are one number each.
    """
    if any(isinstance(record.get(name), list) for name in _SINGLE):
        return False
    numbers = [v for name, v in record.items() if name != "kind"]
    flat = [n for v in numbers for n in (v if isinstance(v, list) else [v])]
    numeric = all(n is None or isinstance(n, int | float) for n in flat)
    return numeric and type(record.get("step")) is int and isinstance(record.get("kind"), str)


def _line(record: dict[str, Any]) -> str:
    return plain_json(record, indent=None) + "\n"


def _number(value: Any) -> Any:
    """Return a value of a record with NaN in place of null."""
    if isinstance(value, list):
        return [_number(part) for part in value]
    return math.nan if value is None else value


def find_runs(path: str | Path) -> list[RunFolder]:
    """Find the run at ``path``, or the runs in its sub-folders, in the order of their names.

    Raises ValueError when there is none.
    """
    root = Path(path)
    if RunFolder(root).is_run():
        return [RunFolder(root)]
    folders = sorted(root.iterdir()) if root.is_dir() else []
    runs = [RunFolder(folder) for folder in folders if RunFolder(folder).is_run()]
    if not runs:
        raise InputError(f"{root} is not a run folder and holds none; make one with l2r train")
    return runs
