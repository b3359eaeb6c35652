"""Several l2r commands in one process, each with a deadline: imports are paid for once.

    python scripts/machines/in_one_process.py "80 bench router --seconds 1" "45 bench moe"

Each argument is a number of seconds and a command line. One that fails or is late is said, and the
next one starts. Exit code 1 where one did not end well.
"""

import shlex
import signal
import sys
import time
from typing import NoReturn

from l2r.cli import main as l2r


class LateError(Exception):
    """A command reached its deadline."""


def ended(line: str) -> bool:
    """Run a command line; whether it ended well, and in time."""
    limit, *words = shlex.split(line)
    start, outcome = time.monotonic(), "exit 0"
    signal.alarm(int(limit))
    try:
        l2r(words)
    except SystemExit as end:
        outcome = f"exit {end.code or 0}"
    except LateError:
        outcome = f"not ended after {limit} s"
    finally:
        signal.alarm(0)
    print(f"{' '.join(words[:2])}: {outcome}, {time.monotonic() - start:.0f} s", flush=True)
    return outcome == "exit 0"


def main() -> int:
    """Run all, in their order."""

    def late(*_: object) -> NoReturn:
        raise LateError

    signal.signal(signal.SIGALRM, late)
    failed = [line for line in sys.argv[1:] if not ended(line)]
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
