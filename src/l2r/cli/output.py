"""Every line that a command prints, but for tables and bars (console.py)."""

from pathlib import Path

import typer

from l2r.files.wording import printable


def echo(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text on standard output, or error, without what would steer a terminal."""
    typer.echo(printable(str(text)), err=err, nl=nl)


def say(line: str) -> None:
    """Print one line on standard error, apart from the results."""
    echo(line, err=True)


def say_left_out(checkpoint: str, source: Path, new: Path) -> None:
    """Name what a checkpoint's folder holds and the folder that was made from it lacks."""
    from l2r.hf.checkpoints import files_left_out
    from l2r.hf.models import files_of_weights

    names = files_left_out(source, new, files_of_weights(source))
    if names:
        say(f"not copied from {checkpoint}: {', '.join(names)}")
