"""Every line that a command prints, but for tables and bars (console.py)."""

import typer

from l2r.runs.printable import printable


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text on standard output, or error, without what would steer a terminal."""
    typer.echo(printable(str(text)), err=err, nl=nl)
