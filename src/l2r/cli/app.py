"""Assembles the commands; bad input is one line and exit code 2, a bug of ours a file and 70."""

import gc
import importlib
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.main import get_command

from l2r._version import __version__
from l2r.cli.bug import report_bug
from l2r.cli.former import new_spelling
from l2r.cli.output import echo
from l2r.errors import DISK, InputError, is_out_of_memory, using
from l2r.files.cache import named_cache
from l2r.files.wording import printable
from l2r.imports import MissingExtraError
from l2r.laboratory import PACKAGE, has_laboratory, need_laboratory

# By panel of the help. Each module has a function of its name, whose docstring is the help, or a
# group of commands; heavy dependencies are imported inside the function.
PANELS = {
    "Inspect": ("diagnose", "check", "mismatch", "landscape", "report", "paper"),
    "Change": ("swap", "export", "serve"),
    "Train": ("train", "compare", "sweep", "eval", "data"),
    "Study": ("evidence",),
    "Machine": ("doctor", "bench", "params", "plan"),
}
# Commands of the laboratory, in l2r_lab/cli; without it they name what to install.
LABORATORY = (
    "landscape", "report", "paper", "train", "compare", "sweep", "data", "evidence", "bench",
    "params", "plan",
)  # fmt: skip

# click's UsageError, wherever typer keeps it.
_UsageError: Any = typer.BadParameter.__base__

# transformers reads them when it is first imported; our commands have their own bars.
QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}


# Net new objects between two collections of the youngest. Python's own 700 let importing torch and
# transformers, which leave a million objects behind, collect 0.7 seconds long.
_COLLECT_AFTER = 50_000

_BUG = 70  # EX_SOFTWARE of sysexits.h


def build_app() -> typer.Typer:
    """Build the typer application with every command."""
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
            command = _command(name)
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name, rich_help_panel=panel)
            else:
                any_words = {"allow_extra_args": True, "ignore_unknown_options": True}
                absent = name in LABORATORY and not has_laboratory()
                app.command(
                    name, rich_help_panel=panel, context_settings=any_words if absent else None
                )(command)
    return app


def _command(name: str) -> Any:
    """Return a command's function or group; one that names the laboratory if that is missing."""
    if name not in LABORATORY:
        return getattr(importlib.import_module(f"l2r.cli.{name}"), name)
    if has_laboratory():
        return getattr(importlib.import_module(f"{PACKAGE}.cli.{name}"), name)

    def missing(words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
        need_laboratory(f"cli.{name}", name, f"l2r {name}")

    missing.__doc__ = "Needs the laboratory: pip install 'l2r-moe[lab]'."
    return missing


def main(args: list[str] | None = None) -> NoReturn:
    """Run one command and exit with the code that says how it ended.

    0 done; 1 done, and something was found or failed; 2 bad input; 70 a bug of ours; 130 SIGINT;
    143 SIGTERM.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    gc.set_threshold(_COLLECT_AFTER, *gc.get_threshold()[1:])
    words, group = sys.argv[1:] if args is None else args, get_command(build_app())
    try:
        with _exit_on_sigterm(), _printable_messages(), using(*_paths(words), disk=False):
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
    except InputError as error:
        _refuse(error, with_option(one_line(error), group, words))
    except MissingExtraError as error:
        _refuse(error, one_line(error))
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and (error.name or "l2r").split(".")[0] not in (
            "l2r",
            PACKAGE,
        ):
            _refuse(error, missing_package(error))
        if is_out_of_memory(error):
            _refuse(error, f"not enough memory: {one_line(str(error).partition(chr(10))[0])}")
        if isinstance(error, OSError) and error.errno in DISK:
            _refuse(error, f"the disk fails: {one_line(error)}")
        _say(error, report_bug(error, words))
        sys.exit(_BUG)
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


def _refuse(error: Exception, line: str) -> NoReturn:
    """Print the one line on what a person can mend, and exit."""
    _say(error, line)
    sys.exit(2)


def _say(error: Exception, line: str) -> None:
    """Print the line of an error, or its traceback where that is wanted."""
    if os.environ.get("L2R_TRACEBACK"):
        line = "".join(traceback.format_exception(error))
    echo(f"error: {line}", err=True)


def _paths(words: list[str]) -> list[str]:
    """Paths that may be given: words of the command line, values in them, folders of caches."""
    named = [part for word in words for part in (word, word.partition("=")[2]) if part]
    folders = [os.environ.get(name) for name in ("HF_HOME", "HF_HUB_CACHE", "TMPDIR")]
    caches = [named_cache(), os.path.expanduser("~/.cache")]  # noqa: PTH111, which fails homeless
    return [*named, *filter(None, [*folders, *caches])]


def one_line(error: Exception | str) -> str:
    """Put a message on a single line; the name of the error if it has no message."""
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
