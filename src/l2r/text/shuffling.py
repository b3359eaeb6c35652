"""Order and random numbers as pure functions of the seed: a position in training is one integer.

Item number ``position`` of the endless stream is item ``position % size`` of the permutation of
epoch ``position // size``. Nothing has to be saved but the position, and the stream does not
depend on the number of ranks or on the batch size.

What happens to an image depends on its place in the stream alone too: not on the number of ranks or
workers, nor on how a step is cut into micro-batches.
"""

import zlib
from functools import lru_cache

import numpy as np
from jaxtyping import Float, Int, UInt32


@lru_cache(maxsize=2)
def epoch_order(size: int, seed: int, epoch: int) -> UInt32[np.ndarray, " size"]:
    """Permutation of ``range(size)`` for one epoch; read-only, 4 bytes an item.

    Sorts raw draws of a bit generator: numpy promises their stream for ever, but not that of
    ``Generator.permutation``, and a resumed run must see the same order.

    Raises ValueError for an empty set or a negative seed or epoch.
    """
    _check_size(size)
    if seed < 0 or epoch < 0:
        raise ValueError(f"seed and epoch must be >= 0; got seed={seed}, epoch={epoch}")
    draws = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(size)
    order = np.argsort(draws, kind="stable").astype(np.uint32)
    order.flags.writeable = False
    return order


def batch_indices(
    size: int, step: int, batch_size: int, *, seed: int, rank: int = 0, world_size: int = 1
) -> Int[np.ndarray, " rows"]:
    """Items of one rank at one step: its contiguous slice of the global batch.

    ``batch_size`` is the global batch: the ranks' slices, joined in rank order, are the batch
    that a single process would take. A batch that crosses the end of an epoch goes on with the
    next permutation.

    Raises ValueError when the batch cannot be split evenly, or the rank or step does not exist.
    """
    if batch_size < 1 or world_size < 1 or batch_size % world_size:
        raise ValueError(
            f"batch_size must be a positive multiple of world_size; got batch_size={batch_size}, "
            f"world_size={world_size}"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}); got rank={rank}")
    if step < 0:
        raise ValueError(f"step must be >= 0; got {step}")
    _check_size(size)
    count = batch_size // world_size
    position = step * batch_size + rank * count
    parts = []
    while count > 0:
        epoch, offset = divmod(position, size)
        part = epoch_order(size, seed, epoch)[offset : offset + count]
        parts.append(part.astype(np.int64))
        position, count = position + len(part), count - len(part)
    return np.concatenate(parts)


def uniform_draws(
    positions: Int[np.ndarray, " B"], count: int, *, seed: int, purpose: str
) -> Float[np.ndarray, "B count"]:
    """``count`` numbers in [0, 1) for every position; ``purpose`` keeps uses apart.

    Raw bits of a bit generator, whose stream numpy promises for ever.
    """
    if count == 0:
        return np.empty((len(positions), 0))
    tag = zlib.crc32(purpose.encode())
    bits = [
        np.random.PCG64(np.random.SeedSequence([seed, tag, int(position)])).random_raw(count)
        for position in positions
    ]
    raw = np.stack(bits) if bits else np.empty((0, count), dtype=np.uint64)
    return (raw >> np.uint64(11)) * 2.0**-53


def _check_size(size: int) -> None:
    if not 1 <= size < 2**32:
        raise ValueError(f"size must be between 1 and 2**32 - 1; got size={size}")
