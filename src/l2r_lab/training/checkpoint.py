"""Checkpoints by torch.distributed.checkpoint in safetensors: exact, atomic, never unpickled.

A checkpoint is a folder ``step-N`` with the shards of every rank and ``state.json``. Names are
flat (``model.…``, ``optimizer.….exp_avg``), so a run saved under DDP loads under FSDP2.
"""

import os
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from l2r.errors import InputError, PathError, blames_input, is_of_disk
from l2r.files.atomic import make_folder, publish, remove, write_json
from l2r.files.folder import RunFolder
from l2r.files.reading import parse_json, read_bytes
from l2r.hf.models import check_finite
from l2r_lab.training.ranks import Ranks

_MODEL = "model."
_RANDOM = "random."


def save_checkpoint(
    run: RunFolder,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    *,
    keep: int,
    near: Sequence[float] = (),
    extra: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write ``step-N`` under a hidden name, rename it, then remove those that need not stay.

    The newest ``keep`` stay, and of each step in ``near`` the checkpoint nearest to it.

    Raises PathError when the disk is full; the previous checkpoints are untouched then.
    """
    target = run.checkpoints / f"step-{step:08d}"
    temporary = run.checkpoints / f".{target.name}.part"
    if ranks.first:
        remove(temporary)
        make_folder(run.path, run.checkpoints.name)
        temporary.mkdir()  # it must not exist, so that it is no link either
    ranks.wait()
    state = {**_tensors(model, optimizer), **(extra or {}), **_random_state(ranks)}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # torch 2.10
            writer = HuggingFaceStorageWriter(path=str(temporary), save_distributed=True)
            save(state, storage_writer=writer, no_dist=ranks.world == 1)
    except BaseException as error:
        if ranks.first:
            remove(temporary)
        if is_of_disk(_innermost(error)):
            raise PathError(f"cannot write checkpoint {target}: {_cause(error)}") from error
        raise
    if ranks.first:
        sums = {}
        for shard in sorted(temporary.iterdir()):
            with shard.open("rb") as stream:
                os.fsync(stream.fileno())
            sums[shard.name] = _checksum(shard)
        facts = {"step": step, "world": ranks.world, "crc32": sums}
        write_json(temporary / "state.json", facts)
        remove(target)
        publish(temporary, target)
        names = {path.name.removeprefix("step-"): path for path in run.complete_checkpoints()}
        saved = {int(name): path for name, path in names.items() if name.isdigit()}
        for number in saved.keys() - steps_kept(list(saved), keep, near):
            remove(saved[number])
    ranks.wait()
    return target


def steps_kept(steps: Sequence[int], keep: int, near: Sequence[float] = ()) -> set[int]:
    """Choose the newest ``keep`` checkpoints and the nearest to each of ``near``, by step.

    Of two that are equally near, the earlier one. The nearest of all that were ever saved is among
    those kept before, so that choosing again after each checkpoint loses none.
    """
    nearest = {min(sorted(steps), key=lambda step: abs(step - target)) for target in near}
    return {*sorted(steps)[-keep:], *nearest}


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
    *,
    extra: Mapping[str, Tensor] | None = None,
) -> int:
    """Fill model, optimizer, ``extra`` and random state from ``folder``; return its step.

    Random states return only where the number of ranks is that of the saved run, and a GPU's only
    where the saved run had one; nothing else depends on either. Raises ValueError for a damaged
    checkpoint or one of another model.
    """
    step, world = _verified(folder, ranks)
    tensors = {**_tensors(model, optimizer), **(extra or {})}
    random = _random_state(ranks) if world == ranks.world else {}
    state = {**tensors, **random}
    read = _read(folder, state, ranks)
    _restore_random_state({name: state[name] for name in random.keys() & read}, ranks)
    return step


def load_weights(folder: Path, model: nn.Module) -> int:
    """Fill a model alone, in one process, and return the checkpoint's step; ValueError as above."""
    ranks = Ranks(0, 1, next(model.parameters()).device)
    step, _ = _verified(folder, ranks)
    values: dict[str, Any] = get_model_state_dict(model)
    _read(folder, {_MODEL + name: value for name, value in values.items()}, ranks)
    return step


def _verified(folder: Path, ranks: Ranks) -> tuple[int, int]:
    """Step and number of ranks of a checkpoint whose shards are what was written."""
    try:
        saved = parse_json(read_bytes(folder / "state.json"))
        step, world, sums = int(saved["step"]), int(saved["world"]), dict(saved["crc32"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"checkpoint {folder} has no readable state.json: {error}") from error
    if ranks.first:
        for name, expected in sums.items():
            shard = folder / Path(name).name
            if not shard.is_file() or _checksum(shard) != expected:
                raise InputError(f"checkpoint {folder} cannot be loaded: {name} is damaged")
    return step, world


def _read(folder: Path, state: dict[str, Any], ranks: Ranks) -> set[str]:
    """Fill the tensors of ``state`` from the shards; return the names of those that were filled.

    Only random states may be missing: a run on a CPU saved none of a GPU.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            reader = HuggingFaceStorageReader(path=str(folder))
            saved: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
            state = {n: v for n, v in state.items() if n in saved or not n.startswith(_RANDOM)}
            left = sorted(name for name in saved.keys() - state.keys() if name.startswith(_MODEL))
            if left:
                raise InputError(f"the model has no place for {', '.join(left[:3])}")
            numbers = {
                name: torch.empty(saved[name].size, dtype=value.dtype, device=value.device)
                for name, value in state.items()
                if _is_other(value, saved.get(name))
            }
            load({**state, **numbers}, storage_reader=reader, no_dist=ranks.world == 1)
        for name, number in numbers.items():
            mine = state[name].to_local() if isinstance(state[name], DTensor) else state[name]
            mine.view(-1).copy_(number.view(-1)[: mine.numel()])
        check_finite((name, value) for name, value in state.items() if name.startswith(_MODEL))
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        if not blames_input(error):
            raise
        raise InputError(f"checkpoint {folder} cannot be loaded: {_cause(error)}") from error
    return set(state)


def _is_other(value: Tensor, saved: Any) -> bool:
    """Tell whether a number was saved in another shape, as under FSDP2, which splits vectors."""
    return saved is not None and value.numel() == 1 and value.shape != saved.size


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the run under a flat name; the same names under DDP and FSDP2.

    An optimizer without slots gets them, by a step that changes nothing.
    """
    values, optimized = get_state_dict(model, optimizer)
    slots: Any = optimized["state"]
    state: dict[str, Any] = {_MODEL + name: value for name, value in values.items()}
    for name, own in slots.items():
        state |= {f"optimizer.{name}.{slot}": value for slot, value in own.items()}
    return state


def _random_state(ranks: Ranks) -> dict[str, Tensor]:
    state = {f"{_RANDOM}{ranks.rank}.cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state[f"{_RANDOM}{ranks.rank}.cuda"] = torch.cuda.get_rng_state(ranks.device)
    return state


def _restore_random_state(state: dict[str, Any], ranks: Ranks) -> None:
    for name, value in state.items():
        if name.endswith(".cpu"):
            torch.set_rng_state(value)
        else:
            torch.cuda.set_rng_state(value, ranks.device)


def _checksum(path: Path) -> int:
    """CRC-32 of a file: finds flipped bits at the speed of the disk."""
    value = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            value = zlib.crc32(block, value)
    return value


def _cause(error: BaseException) -> str:
    """First line of the innermost message; DCP wraps causes per rank."""
    error = _innermost(error)
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _innermost(error: BaseException) -> BaseException:
    """Return what one of the ranks raised."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error
