"""SIGTERM and the first SIGINT ask the loop to save and stop; the second SIGINT stops at once."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether somebody asked to stop, and which signal it was."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Catch the two signals inside the block; handlers are put back afterwards."""
    request = StopRequest()

    def handle(number: int, frame: FrameType | None) -> None:
        if request and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = signal.Signals(number)

    try:
        old = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: signals stay with their owner
        yield request
        return
    try:
        yield request
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
