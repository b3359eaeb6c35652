"""Keep freed memory in the process: the allocator's part of a training step's time."""

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of glibc's mallopt
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Ask glibc not to give memory back between steps; whether it agreed.

    Without it, every activation above 32 MiB (and at first above 128 KiB) is a fresh mapping that
    costs a page fault for each 4 KiB in every step: about a sixth of a small model's step on a CPU
    (dev/LOG.md). The process then keeps its peak until it ends. Does nothing on
    another system or C library, or with L2R_KEEP_MEMORY=off.
    """
    if os.environ.get("L2R_KEEP_MEMORY", "on") == "off":
        return False
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, _LARGEST))
