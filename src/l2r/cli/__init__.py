"""The ``l2r`` command: a file per sub-command, each thin: parse, call, print.

Imports every room, inside its functions. Begin at app.py, which lists the commands.
"""

import sys
from typing import NoReturn


def main(args: list[str] | None = None) -> NoReturn:
    """Run one command; without the packages of the ``cli`` extra, say what to install."""
    try:
        from l2r.cli.app import main as run
    except ModuleNotFoundError as error:
        sys.exit(f"error: the l2r command needs {error.name!r}; pip install 'l2r-moe[cli]'")
    run(args)


__all__ = ["main"]
