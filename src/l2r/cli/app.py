"""Assembles the commands and turns bad input into one line and exit code 2."""

import importlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.main import get_command

from l2r._version import __version__
from l2r.cli.former import new_spelling
from l2r.cli.output import echo
from l2r.imports import MissingExtraError
from l2r.runs.printable import printable

# By panel of the help. Each module has a function of its name, whose docstring is the help, or a
# group of commands; heavy dependencies are imported inside the function.
PANELS = {
    "Inspect": ("diagnose", "check", "mismatch", "landscape", "report"),
    "Change": ("swap", "export", "serve"),
    "Train": ("train", "compare", "sweep", "eval", "data"),
    "Study": ("evidence",),
    "Machine": ("doctor", "bench", "params", "plan"),
}

# Of click, or of the copy of click that newer versions of typer hold.
_UsageError: Any = typer.BadParameter.__base__

# What torch says of sizes that no machine has.
_TOO_LARGE = (
    "can't allocate memory",
    "Storage size calculation overflowed",
    "Overflow when unpacking",
)

# transformers reads them when it is first imported; our commands have their own bars.
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}


def build_app() -> typer.Typer:
    """The typer application with every command."""
    app = typer.Typer(
        name="l2r",
        help="Low-rank and Lipschitz-controlled routing for mixture-of-experts.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def l2r(
        version: Annotated[
            bool,
            typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
        ] = False,
    ) -> None:
        """Options of all commands."""

    for panel, names in PANELS.items():
        for name in names:
            command = getattr(importlib.import_module(f"l2r.cli.{name}"), name)
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name, rich_help_panel=panel)
            else:
                app.command(name, rich_help_panel=panel)(command)
    return app


def main(args: list[str] | None = None) -> NoReturn:
    """Run one command and exit: 0 done, 2 bad input, 130 SIGINT, 143 SIGTERM."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    words, group = sys.argv[1:] if args is None else args, get_command(build_app())
    try:
        with _exit_on_sigterm(), _printable_messages():
            code = group(args=words, prog_name="l2r", standalone_mode=False)
    except _UsageError as error:
        text, where = error.format_message(), error.ctx
        if (new := new_spelling(words)) is not None:
            echo(f"error: {new}", err=True)
            sys.exit(2)
        path = "l2r" if where is None else where.command_path
        text = text.replace("Value error, ", "")  # pydantic's, of a choice
        line = f"error: {one_line(text).rstrip('.')}; see {path} --help"
        echo(line if words else text, err=True)
        sys.exit(2)
    except (ValueError, OSError, MemoryError, OverflowError, RecursionError) as error:
        if os.environ.get("L2R_TRACEBACK"):
            raise
        echo(f"error: {with_option(one_line(error), group, words)}", err=True)
        sys.exit(2)
    except MissingExtraError as error:
        echo(f"error: {one_line(error)}", err=True)
        sys.exit(2)
    except (RuntimeError, TypeError) as error:
        if not any(words in str(error) for words in _TOO_LARGE) or os.environ.get("L2R_TRACEBACK"):
            raise
        echo(f"error: a size is too large: {one_line(str(error).splitlines()[0])}", err=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        echo(f"error: {missing_package(error)}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        code = 130
    if code == 130:
        echo("interrupted", err=True)
    sys.exit(code if isinstance(code, int) else 0)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit(143) at the first SIGTERM, so that what is half done is removed.

    The second ends the process at once. A handler of others, or a signal that is ignored, stays.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def _printable_messages() -> Iterator[None]:
    """Log records and warnings of every library without what would steer a terminal."""
    records, warning = logging.getLogRecordFactory(), warnings.formatwarning

    def record(*args: Any, **fields: Any) -> logging.LogRecord:
        made = records(*args, **fields)
        with suppress(TypeError, ValueError):  # arguments that do not fit: logging says so
            text = made.getMessage()
            if (plain := printable(text)) != text:  # else formatters may want the arguments
                made.msg, made.args = plain, ()
        return made

    logging.setLogRecordFactory(record)
    warnings.formatwarning = lambda *args, **named: printable(warning(*args, **named))
    try:
        yield
    finally:
        logging.setLogRecordFactory(records)
        warnings.formatwarning = warning


def one_line(error: Exception | str) -> str:
    """A message on a single line; an operating-system error is its path and its reason."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        reason = error.strerror[0].lower() + error.strerror[1:]
        path = error.filename2 or error.filename  # the second is where a finished file is moved
        error = f"cannot use {path}: {reason}"
    return " ".join(str(error).split()) or type(error).__name__


def with_option(message: str, group: Any, words: list[str]) -> str:
    """``out must be a new folder`` as ``--out must be ...``, where the command has the option."""
    command = group
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    name, space, rest = message.partition(" ")
    options = {p.name: max(p.opts, key=len) for p in command.params if p.opts[0].startswith("-")}
    return f"{options.get(name.replace('-', '_'), name)}{space}{rest}"


def missing_package(error: ModuleNotFoundError) -> str:
    """Install line for a command whose optional dependency is missing."""
    from l2r.cli.extras import how_to_install

    name = error.name or ""
    return f"this command needs the package {name!r}; pip install {how_to_install(name)}"


def _version(show: bool) -> None:
    if show:
        echo(f"l2r {__version__}")
        raise typer.Exit
