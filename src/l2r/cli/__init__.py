"""The ``l2r`` command: a file per sub-command, each thin: parse, call, print."""

from l2r.cli.app import main

__all__ = ["main"]
