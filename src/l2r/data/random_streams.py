"""Random numbers as a pure function of (seed, purpose, stream position).

What happens to an image depends on its place in the training stream alone: not on the number of
ranks or workers, nor on how a step is cut into micro-batches. Nothing has to be saved to resume.
"""

import zlib

import numpy as np
from jaxtyping import Float, Int


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
