"""Run several modules in one process, each with a deadline: imports are paid for once.

    python -m scripts.machines.in_one_process "80 benchmarks.router --seconds 1" "45 l2r doctor"

Each argument is a number of seconds, a module and its words. One that fails or is late is said, and
the next one starts. Exit code 1 where one did not end well.
"""

import runpy
import shlex
import signal
import sys
import time
from typing import NoReturn


class LateError(Exception):
    """A module reached its deadline."""


def ended(line: str) -> bool:
    """Run a module; return whether it ended well, and in time."""
    limit, module, *words = shlex.split(line)
    start, outcome, before = time.monotonic(), "exit 0", sys.argv
    signal.alarm(int(limit))
    try:
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        outcome = f"exit {end.code or 0}"
    except LateError:
        outcome = f"not ended after {limit} s"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        sys.argv = before
    print(
        f"{' '.join([module, *words][:3])}: {outcome}, {time.monotonic() - start:.0f} s", flush=True
    )
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
