"""What a command on checkpoints will take, in one line: weights, tokens, and about how long.

The time is that of the model's matrix products, counted without memory for its weights, at the
speed of such a product here, and of reading the weights. What cannot be told is left out.
"""

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from l2r.cost.benchmarks import product_speed
from l2r.hf.checkpoints import (
    Placement,
    checkpoint_folder,
    meta_model,
    weight_bytes,
    weight_files,
)
from l2r.hf.models import forward_flops
from l2r.hf.swap import find_sites

_BLOCK, _BLOCKS = 1 << 23, 4  # bytes of weights that are read to know the speed, and how often
_WITH_BACKWARD = 3  # forward passes that one with a backward pass counts as
_UNITS = {"day": (86_400, 36 * 3600), "hour": (3600, 90 * 60), "minute": (60, 45)}


@dataclass(frozen=True)
class Reads:
    """Forward passes: each of ``rows`` is read ``times``, at most ``at_once`` of them in a pass.

    length: tokens of a row, None for images. backward: with gradients.
    """

    rows: int
    length: int | None
    at_once: int
    times: int = 1
    backward: bool = False

    @property
    def passes(self) -> int:
        """Number of forward passes."""
        return self.times * -(-self.rows // self.at_once)


def check_reads(rows: int, length: int | None) -> list[Reads]:
    """What a check reads: its batch, and a few rows for the losses, the mask and the gradients."""
    short = None if length is None else min(64, length)
    few = min(2, rows)
    reads = [Reads(rows, length, rows), Reads(few, short, few, times=2, backward=True)]
    if short is not None:
        reads += [Reads(few, short, few, times=3), Reads(2, short, 2, times=2)]
    return reads


def diagnosis_reads(
    rows: int, length: int | None, at_once: int, *, gain: int, earlier: int
) -> list[Reads]:
    """What a diagnosis reads: all rows for each checkpoint, and some with other experts twice."""
    some = min(rows, gain if length is not None or not gain else max(gain, 2048))
    return [
        Reads(rows, length, at_once, times=1 + earlier),
        Reads(some, length, at_once, times=3),
    ]


def fit_reads(
    tokens: int, held_out: int, length: int, at_once: int, *, updates: int, train_steps: int
) -> list[Reads]:
    """What a fit reads: its text once, the held-out text for every measurement, and to train."""
    measured = 3 + 2 * (updates > 0) + (train_steps > 0)
    rows = {n: max(1, n // length) for n in (tokens, held_out)}
    return [
        Reads(rows[tokens], length, at_once, times=int(updates > 0)),
        Reads(rows[held_out], length, at_once, times=measured),
        Reads(train_steps * at_once, length, at_once, backward=True),
    ]


def first_line(
    checkpoints: Sequence[Path],
    reads: Sequence[Reads],
    placement: Placement,
    *,
    tokens: int | None = None,
    trust_remote_code: bool = False,
) -> str:
    """``13.8 GB of weights, 8,192 tokens, about 7 minutes``; empty where nothing is known.

    ``reads`` are of each of the ``checkpoints``, whose weights and times are added up. ``tokens``
    are those of the data, by default of the first of ``reads``. Without ``reads`` no time is told.
    """
    if tokens is None and reads and reads[0].length is not None:
        tokens = reads[0].rows * reads[0].length
    folders = [checkpoint_folder(path) for path in checkpoints]
    parts = [_weights(folders, placement.dtype)]
    if tokens is not None:
        parts.append(f"{tokens:,} tokens{' each' if len(folders) > 1 else ''}")
    elif reads:
        parts.append(f"{reads[0].rows:,} images")
    with suppress(Exception):  # of any kind: loading the model says what is wrong
        seconds = [
            _seconds(folder, reads, placement.here(), trust_remote_code) for folder in folders
        ]
        parts.append(about(sum(seconds)) if reads else "")
    return ", ".join(part for part in parts if part)


def about(seconds: float) -> str:
    """A time in words, with one digit: ``about 7 minutes``."""
    for unit, (size, least) in _UNITS.items():
        if seconds >= least:
            count = seconds / size
            digit = 10 ** math.floor(math.log10(max(count, 1)))
            count = round(count / digit) * digit
            return f"about {count:,} {unit}{'s' * (count > 1)}"
    return "under a minute"


def _weights(folders: Sequence[Path], dtype: str) -> str:
    """Bytes of the files, and of memory where that is another number."""
    with suppress(Exception):  # as above
        stored, held = (sum(weight_bytes(f, d) for f in folders) for d in ("auto", dtype))
        if stored:
            memory = f" ({_size(held)} in {dtype})" if held != stored else ""
            return f"{_size(stored)} of weights{memory}"
    return ""


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _seconds(
    folder: Path, reads: Sequence[Reads], placement: Placement, trust_remote_code: bool
) -> float:
    """Time to read the weights of a checkpoint and run it. Raises where it cannot be told."""
    model = meta_model(folder, trust_remote_code=trust_remote_code)
    dtype = _dtype(model, placement)
    seconds = 0.0
    per_row: dict[int | None, int] = {}
    for part in reads:
        if not part.rows * part.times:
            continue
        if part.length not in per_row:
            per_row[part.length] = forward_flops(model, _row(model, part.length))[""]
        flops = part.rows * part.times * per_row[part.length]
        rows = min(part.rows, part.at_once) * (part.length or _patches(model))
        speed = product_speed(placement.device, dtype, *_product(model, rows))
        seconds += (_WITH_BACKWARD if part.backward else 1) * flops / speed
    again = sum(part.passes for part in reads) * placement.bytes_on_disk(folder)
    return seconds + (weight_bytes(folder) + again) / _reading_speed(weight_files(folder))


def _dtype(model: Any, placement: Placement) -> torch.dtype:
    """The dtype in which the model computes."""
    if placement.dtype != "auto":
        return getattr(torch, placement.dtype)  # type: ignore[no-any-return]
    config = model.config
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return own or torch.float32


def _row(model: Any, length: int | None) -> dict[str, torch.Tensor]:
    if length is not None:
        return {"input_ids": torch.zeros(1, length, dtype=torch.int64, device="meta")}
    config = model.config
    side = config.image_size
    height, width = (side, side) if isinstance(side, int) else side
    shape = (1, config.num_channels, height, width)
    return {"pixel_values": torch.empty(shape, dtype=torch.bfloat16, device="meta")}


def _patches(model: Any) -> int:
    """Patches of an image."""
    *_, height, width = _row(model, None)["pixel_values"].shape
    return max(1, height * width // int(model.config.patch_size) ** 2)


def _product(model: nn.Module, tokens: int) -> tuple[int, int, int]:
    """Rows, inputs and outputs of the product that is most of a pass: an expert's, if there are."""
    sites = find_sites(model)
    if not sites:
        width = int(model.config.get_text_config().hidden_size)  # type: ignore[union-attr, operator]
        return tokens, width, width
    experts, hidden, top_k = (
        sites[0].sizes[name] for name in ("num_experts", "hidden_size", "top_k")
    )
    matrices = [p for n, p in model.named_parameters() if p.dim() == 3 and len(p) == experts]
    width = matrices[0].numel() // (experts * hidden) if matrices else hidden
    return max(1, tokens * top_k // experts), hidden, width


def _reading_speed(files: Sequence[Path]) -> float:
    """Bytes of weights a second, from disk or the cache of files into new memory."""
    sizes = [file.stat().st_size for file in files]
    start, done = time.perf_counter(), 0
    for part in range(_BLOCKS):
        at = part * sum(sizes) // _BLOCKS
        for file, size in zip(files, sizes, strict=True):
            if at < size:
                with file.open("rb", buffering=0) as stream:
                    stream.seek(at)
                    done += len(stream.read(_BLOCK))
                break
            at -= size
    return done / (time.perf_counter() - start)
