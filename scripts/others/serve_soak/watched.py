"""``l2r`` in a process that says what memory it keeps: ``python watched.py FILE serve ...``.

At a signal USR1 it collects garbage, gives back to the system what malloc has free, and adds a line
of JSON to FILE: ``blocks``, of at most 512 bytes, that Python has in use; ``bytes`` that malloc has
in use, everything larger and all of C++; ``resident`` bytes. Needs Linux with glibc 2.33.
"""

import ctypes
import gc
import json
import runpy
import signal
import sys
from pathlib import Path

import psutil

_FIELDS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
    "keepcost",
)  # fmt: skip


class _MallocState(ctypes.Structure):
    """glibc's ``struct mallinfo2``, of all arenas."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


_glibc = ctypes.CDLL(None)
_glibc.mallinfo2.restype = _MallocState


def kept() -> dict[str, int]:
    """What this process holds once all is given back that can be."""
    gc.collect()
    _glibc.malloc_trim(0)
    state = _glibc.mallinfo2()
    return {
        "blocks": sys.getallocatedblocks(),
        "bytes": state.uordblks + state.hblkhd,
        "resident": psutil.Process().memory_info().rss,
    }


if __name__ == "__main__":
    file = Path(sys.argv.pop(1))

    def say(*_: object) -> None:
        """Add a line."""
        with file.open("a") as stream:
            stream.write(json.dumps(kept()) + "\n")

    signal.signal(signal.SIGUSR1, say)
    runpy.run_module("l2r", run_name="__main__")
