"""Estimate what a command on checkpoints will take, in one line: weights, tokens, and the time.

The time is that of the model's matrix products, counted without memory for its weights, at the
speed of such a product on this machine (measured here), and of reading the weights. A number that
cannot be estimated is left out of the line.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from l2r.analysis.diagnostics import GAIN_IMAGES
from l2r.analysis.diagnostics.settings import Extent
from l2r.analysis.inputs import rows_of_text
from l2r.analysis.own_text import check_room, passages
from l2r.files.mismatch import ARITHMETICS
from l2r.hf.checkpoints import (
    Placement,
    checkpoint_folder,
    is_image_classifier,
    load_config,
    load_tokenizer,
    meta_model,
    token_ids,
    weight_files,
    weight_sizes,
)
from l2r.hf.models import forward_flops
from l2r.hf.swap import find_sites
from l2r.text import Texts, TextSettings

_BLOCK, _BLOCKS = 1 << 23, 4  # bytes of weights that are read to know the speed, and how often
_TEXT = 1 << 20  # characters of a text that are tokenized to know how many tokens it has
_WITH_BACKWARD = 3  # forward passes that one with a backward pass counts as
# Products of a router, in float64, that take as long as both searches for a flip at one token:
# they run it 2,100 times (one with a gradient counts as 3), and do thrice as much between.
_SEARCH = 8000
_SLOW, _SHORT = 1e9, 30.0  # products a second of a slow machine; seconds that are not worth more
_UNITS = {"day": (86_400, 36 * 3600), "hour": (3600, 90 * 60), "minute": (60, 45)}
_WIDEST, _PRODUCT = 4096, 2**27  # sizes and multiply-adds of the product that is timed
_TURN, _TURNS = 0.005, 5  # seconds of one turn, and how many


@dataclass(frozen=True)
class Reads:
    """Forward passes: each of ``rows`` is read ``times``, at most ``at_once`` of them in a pass.

    length: tokens of a row, None for images. backward: with gradients. dtype: another one than the
    weights are loaded in.
    """

    rows: int
    length: int | None
    at_once: int
    times: int = 1
    backward: bool = False
    dtype: str | None = None

    @property
    def passes(self) -> int:
        """Number of forward passes."""
        return self.times * -(-self.rows // self.at_once)


def reads_of_check(rows: int, length: int | None) -> list[Reads]:
    """List the reads of a check: its batch, and a few rows for losses, mask and gradients."""
    few = min(2, rows)
    if length is None:
        return [Reads(rows, None, rows), Reads(few, None, few, backward=True)]
    short = min(64, length)
    return [
        Reads(rows, length, rows),
        Reads(few, short, few, times=3),
        Reads(2, short, 2, times=2),
        Reads(few, short, few, times=2, backward=True),
    ]


def reads_of_diagnosis(
    checkpoint: Path,
    instances: int,
    length: int,
    extent: Extent,
    earlier: Sequence[Path] = (),
) -> list[Reads]:
    """List the reads of a diagnosis: all rows for each checkpoint, and some twice, rerouted."""
    rows, of = rows_read(checkpoint, instances, length)
    gain = max(extent.gain, GAIN_IMAGES) if of is None and extent.gain else extent.gain
    return [
        Reads(rows, of, extent.batch_size, times=1 + len(earlier)),
        Reads(min(rows, gain), of, extent.batch_size, times=3),
    ]


def reads_of_comparison(
    checkpoint: Path,
    rows: int,
    length: int | None,
    at_once: int,
    *,
    against: str | None,
    other: Path | None,
    answered: bool,
    recorded: bool,
) -> tuple[list[tuple[Path, list[Reads]]], int | None]:
    """List the reads of a comparison, and count its tokens: None for answers of an engine.

    The other side reads all rows with its own experts and with the reference's.
    """
    once = Reads(rows, length, at_once)
    own = [once] if recorded else []
    if answered:
        return [(checkpoint, own)], None
    if other is not None:
        work = [(checkpoint, [*own, once]), (other, [replace(once, times=2)])]
    elif against in ARITHMETICS:
        dtype = "bfloat16" if against == "bf16" else None
        work = [(checkpoint, [*own, once, replace(once, times=2, dtype=dtype)])]
    elif against is not None:
        work = [(checkpoint, [*own, Reads(rows, length, 1, times=2)])]
    else:
        work = [(checkpoint, own)]
    return work, rows * (length or 0)


def reads_of_fit(
    tokens: int, held_out: int, length: int, at_once: int, *, updates: int, train_steps: int
) -> list[Reads]:
    """List the reads of a fit: its text once, held-out text for every measurement, training."""
    measured = 3 + 2 * (updates > 0) + (train_steps > 0)
    rows = {n: max(1, n // length) for n in (tokens, held_out)}
    return [
        Reads(rows[tokens], length, at_once, times=int(updates > 0)),
        Reads(rows[held_out], length, at_once, times=measured),
        Reads(train_steps * at_once, length, at_once, backward=True),
    ]


def announce(
    work: Sequence[tuple[Path, Sequence[Reads]]],
    placement: Placement,
    report: Callable[[str], object],
    *,
    tokens: int | None = None,
    searched: int = 0,
    trust_remote_code: bool = False,
) -> None:
    """Report ``13.8 GB of weights, 8,192 tokens, about 7 minutes``; nothing where all is unknown.

    Quantized weights are named first: ``MXFP4, computed in bf16; 13.8 GB of weights, ...``.
    ``work``: checkpoints, and what each reads; their weights and times are added up. ``tokens``
    are those of the data, by default of the first of each one's reads. ``searched``: tokens that
    each layer gets certified radii and searches for. No reads, no time.
    """
    firsts = [reads[0] for _, reads in work if reads]
    parts = [_weights([checkpoint_folder(path) for path, _ in work], placement.dtype)]
    if tokens is not None or all(read.length is not None for read in firsts):
        count = sum(r.rows * (r.length or 0) for r in firsts) if tokens is None else tokens
        parts.append(f"{count:,} tokens" if count else "")
    else:
        parts.append(f"{sum(read.rows for read in firsts):,} images")
    with suppress(Exception):  # of any kind: loading the model says what is wrong
        seconds = sum(_at_most(path, reads, searched) for path, reads in work)
        if seconds > _SHORT:
            here = placement.here()
            trusted = {"trust_remote_code": trust_remote_code}
            seconds = sum(_seconds(path, reads, here, searched, **trusted) for path, reads in work)
        parts.append(about(seconds) if firsts else "")
    if line := ", ".join(part for part in parts if part):
        report(line)


def rows_read(
    checkpoint: Path,
    instances: int,
    length: int,
    text: str | None = None,
    *,
    trust_remote_code: bool = False,
) -> tuple[int, int | None]:
    """Rows of data for a checkpoint and their length, None for images; ``text`` may give fewer."""
    if is_image_classifier(checkpoint):
        return instances, None
    if text is None:
        return instances, length
    tokenizer = load_tokenizer(checkpoint, trust_remote_code=trust_remote_code)
    ids = token_ids(tokenizer, text, add_special_tokens=False)
    return rows_of_text(max(1, len(ids)), instances, length)


def reads_of_passages(
    checkpoint: Path, text: str, generate: int = 0, *, trust_remote_code: bool = False
) -> list[Reads]:
    """List the reads of a text of one's own: its passages, or one with what the model writes."""
    trusted = {"trust_remote_code": trust_remote_code}
    tokenizer = load_tokenizer(checkpoint, **trusted)
    config = load_config(checkpoint, **trusted)
    tokens = len(token_ids(tokenizer, text))
    if generate:
        check_room(tokens, generate, config)
    return [Reads(*passages(max(1, tokens + generate), config), 1)]


def reads_of_inputs(lengths: Sequence[int], at_once: int) -> list[Reads]:
    """List the reads of an evaluation by the lengths of its inputs; none for no inputs."""
    mean = round(sum(lengths) / max(1, len(lengths)))
    return [Reads(len(lengths), mean, at_once)] if lengths else []


def reads_of_text(
    checkpoint: Path,
    texts: Texts,
    settings: TextSettings,
    at_once: int,
    *,
    share: float = 1.0,
    trust_remote_code: bool = False,
) -> tuple[list[Reads], int]:
    """List the windows of an evaluation on a share of texts, and count tokens, by a sample."""
    trusted = {"trust_remote_code": trust_remote_code}
    tokenizer = load_tokenizer(checkpoint, **trusted)
    windows = settings.windows(load_config(checkpoint, **trusted))
    sizes, done = list[int](), 0
    for _, _, text in texts:
        beginning = text[:_TEXT]
        sizes.append(len(token_ids(tokenizer, beginning, add_special_tokens=False)))
        done += len(beginning.encode())
        if done >= _TEXT:
            break
    more = share * texts.bytes / max(1, done)
    cuts = [end - start for size in sizes for start, _, end in windows.over(size + 1)]
    (reads,) = reads_of_inputs(cuts, at_once)
    return [replace(reads, rows=max(1, round(more * len(cuts))))], round(more * sum(sizes))


def about(seconds: float) -> str:
    """Write a time in words, with one digit: ``about 7 minutes``."""
    for unit, (size, least) in _UNITS.items():
        if seconds >= least:
            count = seconds / size
            digit = 10 ** math.floor(math.log10(max(count, 1)))
            count = round(count / digit) * digit
            return f"about {count:,} {unit}{'s' * (count > 1)}"
    return "under a minute"


def _weights(folders: Sequence[Path], dtype: str) -> str:
    """Layouts, bytes of the files, and of memory where that is another number."""
    with suppress(Exception):  # as above
        each = [weight_sizes(folder, dtype) for folder in folders]
        stored, held = sum(part.stored for part in each), sum(part.held for part in each)
        if stored:
            kind = "memory" if dtype == "auto" else dtype
            memory = f" ({_size(held)} in {kind})" if held != stored else ""
            layouts = dict.fromkeys(part.layout for part in each if part.layout)
            return "; ".join([*layouts, f"{_size(stored)} of weights{memory}"])
    return ""


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _at_most(folder: Path, reads: Sequence[Reads], searched: int) -> float:
    """Time that a slow machine takes if each token meets every weight; infinite if unknown."""
    # Two bytes a parameter, more where they have four; half a byte of packed ones.
    layout, stored, _ = weight_sizes(folder)
    parameters = stored * 2 if layout else stored / 2
    if not parameters or any(part.length is None for part in reads):
        return math.inf
    tokens = sum(
        part.rows * part.times * (part.length or 0) * (_WITH_BACKWARD if part.backward else 1)
        for part in reads
    )
    return 2 * parameters * (tokens + _SEARCH * searched) / _SLOW


def _seconds(
    folder: Path,
    reads: Sequence[Reads],
    placement: Placement,
    searched: int = 0,
    *,
    trust_remote_code: bool = False,
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
        runs_in = getattr(torch, part.dtype) if part.dtype else dtype
        speed = product_speed(placement.device, runs_in, *_product(model, rows))
        seconds += (_WITH_BACKWARD if part.backward else 1) * flops / speed
    if searched:
        sizes = [
            (site.sizes["hidden_size"], site.sizes["num_experts"]) for site in find_sites(model)
        ]
        speed = product_speed(placement.device, torch.float64, searched, *sizes[0])
        seconds += _SEARCH * searched * sum(2 * d * n for d, n in sizes) / speed
    again = sum(part.passes for part in reads) * placement.bytes_on_disk(folder)
    return seconds + (weight_sizes(folder).stored + again) / _reading_speed(weight_files(folder))


def _dtype(model: Any, placement: Placement) -> torch.dtype:
    """Return the dtype in which the model computes."""
    if placement.dtype != "auto":
        return getattr(torch, placement.dtype)
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
    """Bytes of weights a second that are read and put in place, in memory not used before."""
    sizes = [file.stat().st_size for file in files]
    start, kept = time.perf_counter(), list[bytearray]()
    for part in range(_BLOCKS):
        at = part * sum(sizes) // _BLOCKS
        for file, size in zip(files, sizes, strict=True):
            if at < size:
                with file.open("rb", buffering=0) as stream:
                    stream.seek(at)
                    kept.append(bytearray(stream.read(_BLOCK)))
                break
            at -= size
    return sum(map(len, kept)) / (time.perf_counter() - start)


def product_speed(device: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> float:
    """Measure floating-point operations per second of ``rows`` through a matrix.

    The median turn counts, on a machine as busy as it is. Sizes are cut where one product takes
    long.
    """
    inputs, outputs = min(inputs, _WIDEST), min(outputs, _WIDEST)
    rows = max(1, min(rows, _PRODUCT // (inputs * outputs)))
    x = torch.randn(rows, inputs, device=device).to(dtype)
    weight = torch.randn(outputs, inputs, device=device).to(dtype)

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            nn.functional.linear(x, weight)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        return time.perf_counter() - start

    seconds(1)  # the first product takes memory
    count = max(1, round(_TURN / max(seconds(1), 1e-7)))
    median = statistics.median(seconds(count) for _ in range(_TURNS)) / count
    return 2 * rows * inputs * outputs / median
