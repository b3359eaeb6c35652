"""Check that the files of a run hold what training, diagnosis and evaluation write into them.

A run may be a stranger's. What reads it goes by the formats of folder.py; where it fails, a second
look tells a file of another form, which is bad input, from a bug of the reader.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from l2r.errors import InputError
from l2r.files.arrays import PatchRouting, TextRouting
from l2r.files.diagnosis import is_diagnosed, read_diagnosis
from l2r.files.folder import RunFolder

_WRONG = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


@contextmanager
def files_of(runs: Sequence[RunFolder]) -> Iterator[None]:
    """Turn an error inside the block into an InputError where a file of a run is of another form.

    The file is named. Where all are as they should be, the error passes: it is the reader's.
    """
    try:
        yield
    except _WRONG as error:
        if isinstance(error, InputError):
            raise
        for file in (file for run in runs for file in misshapen(run)):
            raise InputError(f"{file} does not hold what it should: {error!r}") from error
        raise


def misshapen(run: RunFolder) -> Iterator[Path]:
    """List the files of a run that have another form, or cannot be read."""
    for file, fits in (
        (run.recipe, lambda: _is_recipe(run.read_recipe())),
        (run.environment, lambda: _is_environment(run.read_json(run.environment))),
        (run.metrics, lambda: all(map(_is_measured, run.read_metrics()))),
        (run.evaluation, lambda: _is_evaluation(run.read_json(run.evaluation))),
        (run.patches, lambda: _are_patches(PatchRouting.read(run.patches))),
        (run.text, lambda: _is_text(TextRouting.read(run.text))),
        (run.path / "diagnosis.json", lambda: _is_diagnosis(run)),
    ):
        if file.is_file() and not _holds(fits):
            yield file


def _holds(fits: Callable[[], bool]) -> bool:
    try:
        return fits()
    except _WRONG:
        return False


def _is_recipe(values: Mapping[str, Any]) -> bool:
    plain = {"task": str, "seed": int, "base": str}
    return all(isinstance(v, plain.get(n, dict)) for n, v in values.items() if v is not None)


def _is_environment(facts: Mapping[str, Any]) -> bool:
    kinds: dict[str, type] = {
        "packages": dict,
        "data": dict,
        "gpus": list,
        "processor": str,
        "router": str,
    }
    numbers = ("ranks", "steps", "moe_layers")
    kinds |= dict.fromkeys([n for n in facts if n in numbers or "parameters" in n], int)
    return (
        all(isinstance(facts[n], kind) for n, kind in kinds.items() if facts.get(n) is not None)
        and all(isinstance(name, str) for name in facts.get("gpus") or ())
        and all(isinstance(v, str | None) for v in (facts.get("packages") or {}).values())
    )


def _is_measured(record: Mapping[str, Any]) -> bool:
    """Tell whether a record of training or validation has its loss; reading checks the rest."""
    losses = {"train": "ce", "train_mean": "ce", "validation": "ce/mean"}
    name = losses.get(record["kind"])
    return name is None or name in record or name.removesuffix("/mean") in record


def _is_evaluation(record: Mapping[str, Any]) -> bool:
    names = ("accuracy", "standard_error", "chance", "interval", "settings", "tasks")
    sections = all(isinstance(record.get(name), dict | None) for name in names)
    numbers = [n for name in names[:3] for n in (record.get(name) or {}).values()]
    numbers += [record.get(name) for name in ("top1", "top5", "ce")]
    numbers += [end for pair in (record.get("interval") or {}).values() for end in pair or ()]
    return sections and all(isinstance(n, int | float | None) for n in numbers)


def _are_patches(routing: PatchRouting) -> bool:
    classes = (routing.labels, routing.predictions)
    experts = (routing.experts, routing.class_token)
    return all(_below(each, len(routing.classes)) for each in classes) and all(
        _below(each, int(routing.num_experts)) for each in experts
    )


def _is_text(routing: TextRouting) -> bool:
    rows, length = routing.tokens.shape
    ends = {
        "tokens": len(routing.pieces),
        "domain": len(routing.domains),
        "shown": rows,
        "experts": routing.contexts.shape[1],
        "contexts": rows * length,
        "vocabulary": len(routing.pieces),
    }
    least = {"contexts": -1, "vocabulary": -1}  # where there are fewer
    return all(_below(getattr(routing, n), end, least.get(n, 0)) for n, end in ends.items())


def _below(numbers: np.ndarray, end: int, least: int = 0) -> bool:
    return bool(((numbers >= least) & (numbers < end)).all())


def _is_diagnosis(run: RunFolder) -> bool:
    if not is_diagnosed(run.path):
        return False
    diagnosis = read_diagnosis(run.path)
    arrays = all(np.issubdtype(array.dtype, np.number) for array in diagnosis.arrays.values())
    model = diagnosis.info.get("model", {})
    return arrays and all(isinstance(v, int | float | None) for v in model.values())
