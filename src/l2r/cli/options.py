"""Options and arguments that several commands have: one name, one meaning, declared once.

Where a command has more to say of its own, the help is that meaning, a colon and the rest.

What is wrong with a path or a value is said here, or at the head of a command, before it imports
torch and transformers, which takes seconds.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from l2r.errors import InputError
from l2r.files.reading import refuse_pointer
from l2r.files.wording import existing_path


def existing(checkpoint: Any) -> Any:
    """Find the folder whose name spells the same, if the one named is missing."""
    if isinstance(checkpoint, str | Path):
        path = existing_path(checkpoint)
        return checkpoint if path == Path(checkpoint) else type(checkpoint)(path)
    return checkpoint and [existing(one) for one in checkpoint]


def must_exist(param: typer.CallbackParam, paths: Any) -> Any:
    """Check the path, or the paths, of an option. Raises ValueError for one that is missing."""
    for path in paths if isinstance(paths, list) else [paths]:
        if path is not None and not Path(path).exists():
            raise InputError(f"{param.name} must be a file or a folder that exists; got {path}")
        if path is not None:
            refuse_pointer(Path(path))
    return paths


def images_or_path(param: typer.CallbackParam, source: str | None) -> str | None:
    """Check the data that a command reads. Raises ValueError for no built-in images and no path."""
    from l2r.images import BUILT_IN_IMAGES

    if source in (None, *BUILT_IN_IMAGES):
        return source
    path = os.path.expanduser(source)  # noqa: PTH111, which fails where no home is known
    if Path(path).exists():
        refuse_pointer(Path(path))
        return path
    raise InputError(
        f"{param.name} must be a file or a folder that exists, {' or '.join(BUILT_IN_IMAGES)}; "
        f"got {source}"
    )


def images_or_paths(param: typer.CallbackParam, sources: list[str]) -> list[str]:
    """Check several sources, each as :func:`images_or_path` does."""
    return [images_or_path(param, source) or source for source in sources or ()]


def is_text(param: typer.CallbackParam, text: str | None) -> str | None:
    """Check a text, or - for standard input.

    Raises ValueError for a file, and for a number alone, which the option took in former releases.
    """
    if text in (None, "-"):
        return text
    if not text:
        raise InputError("text must not be empty")
    if text.lstrip("-").isdigit():
        raise InputError(f"text is a string; the number of tokens is --text-tokens; got {text!r}")
    try:
        is_path = Path(text).exists()
    except (OSError, ValueError):  # longer than a path can be, or with a null character
        is_path = False
    if is_path or (" " not in text and text.endswith(_TEXT_SUFFIXES)):
        raise InputError(
            f"text is a string, or - for standard input; files and folders are --data {text}"
        )
    return text


def read_text(text: str) -> str:
    """Return the text, read from standard input for ``-``. Raises ValueError if it is empty."""
    try:
        read = sys.stdin.read() if text == "-" else text
        read.encode()  # bytes of a command line that are not UTF-8 are halves of characters
    except UnicodeDecodeError:
        raise InputError("text must be in UTF-8; standard input is not") from None
    except UnicodeEncodeError as error:
        raise InputError(f"text must be in UTF-8; character {error.start} is not") from None
    if not read:
        raise InputError("text must not be empty")
    return read


def check_one_source(text: str | None, data: Any) -> None:
    """Raise ValueError where both a string and files are to be read."""
    if text is not None and data:
        raise InputError("text must be given without --data: a command reads one or the other")


def refuse_options(context: typer.Context, names: Sequence[str], kind: str) -> None:
    """Raise ValueError for the first of ``names`` that was given: it is for ``kind``."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise InputError(f"--{name.replace('_', '-')} is for {kind}")


def at_least(minimum: int) -> Callable[[typer.CallbackParam, int | None], int | None]:
    """Return a callback that refuses a smaller number, and names it."""

    def check(param: typer.CallbackParam, value: int | None) -> int | None:
        if value is not None and value < minimum:
            raise InputError(f"{param.name} must be >= {minimum}; got {value}")
        return value

    return check


# Endings of what commands read as text: a word with one of them is a file that is not there.
_TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet", ".gz", ".zst")


def _device(name: str) -> str:
    from l2r.machine import device_name

    return device_name(name)


Changes = Annotated[
    list[str] | None, typer.Argument(help="key.sub=value ...: fields of the recipe.")
]
RouterChanges = Annotated[
    list[str] | None,
    typer.Argument(
        help="key.sub=value ...: the new router, router.kind=l2r_sips rank=8 (default: "
        "preset=evidence)."
    ),
]
RECIPE = typer.Argument(help="Packaged recipe (see l2r train --list) or YAML path.")
Recipe = Annotated[str, RECIPE]


def out_option(what: str) -> Any:
    """Declare ``--out``: ``what`` a command writes, and whether that is a file or a folder."""
    return typer.Option("--out", help=f"Where to write: {what}.")


def data_option(what: str, callback: Any = images_or_path) -> Any:
    """Declare ``--data``: ``what`` files and folders a command reads."""
    return typer.Option("--data", help=f"Files or folders to read: {what}.", callback=callback)


def tokens_option(what: str) -> Any:
    """Declare ``--tokens`` of ``what``; read by l2r.files.wording.parse_tokens."""
    return typer.Option("--tokens", help=f"Number of tokens, like 500000 or 10B: {what}.")


NEW_FOLDER = out_option("a new folder for the checkpoint")
Seeds = Annotated[int, typer.Option(help="Number of seeds: from the recipe's on.", min=1)]
Layers = Annotated[str | None, typer.Option(help="Layers by number, like 0,3,5 (default: all).")]
BatchSize = Annotated[
    int, typer.Option(help="Rows, answers or images per forward pass.", callback=at_least(1))
]
Device = Annotated[
    str, typer.Option(help="cpu, cuda, ... or auto: a GPU where there is one.", callback=_device)
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a checkpoint with a hub id.")
]
Dtype = Annotated[
    str,
    typer.Option(help="auto (the checkpoint's own), bfloat16, float16, float32 or float64."),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        help="accelerate's: auto, balanced, sequential or a JSON dictionary (default: one device; "
        "auto where a CPU's memory is too small)."
    ),
]
CHECKPOINT = "Hugging Face folder, run folder or hub id"
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run the Python code that the checkpoint's folder brings."
    ),
]
Checkpoint = Annotated[
    str, typer.Argument(help=f"{CHECKPOINT}.", callback=existing, show_default=False)
]
Checkpoints = Annotated[
    list[str],
    typer.Argument(
        help=f"{CHECKPOINT}; several are compared in order.",
        callback=existing,
    ),
]
Runs = Annotated[
    Path, typer.Argument(help="Run folder, or a folder of run folders.", callback=existing)
]
Text = Annotated[
    str | None,
    typer.Option(help='Text to read: "a string", or - for standard input.', callback=is_text),
]
Data = Annotated[
    str | None,
    data_option(
        "text, or token files (default: the embedded corpus); of images digits, fashion-mnist or a "
        "folder (default: the run's own)"
    ),
]
Length = Annotated[int, typer.Option(help="Tokens per row.", callback=at_least(2))]
Rows = Annotated[
    int,
    typer.Option(
        help="Rows of text over all domains, at least one of each; or images.", callback=at_least(1)
    ),
]
Open = Annotated[bool, typer.Option("--open", help="Open the page in the browser.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print records as JSON.")]


def read_router(changes: Sequence[str] | None) -> dict[str, Any]:
    """Options of a router section from ``router.kind=xmoe rank=8 ...``, checked.

    Raises ValueError for unknown names, fields and values.
    """
    from l2r.files.reading import read_change
    from l2r.routers import RouterConfig
    from l2r.routers.defaults import preset_router

    options = dict(read_change(change) for change in changes or ())
    options = {field.removeprefix("router."): value for field, value in options.items()}
    if "preset" in options:
        preset_router(options, num_experts=64, hidden_size=2**20, top_k=2)  # any sizes: for errors
    else:
        RouterConfig.from_dict({"kind": "l2r_sips", **options})
    return options


def read_layers(text: str | None) -> list[int] | None:
    """Layer indices from ``"0,3,5"``; None for ``all`` or nothing. Raises ValueError otherwise."""
    if text is None or text == "all":
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"layers must be 'all' or indices like 0,3,5; got {text!r}") from None
