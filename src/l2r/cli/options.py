"""Options and arguments that several commands have: one name, one meaning, declared once.

What is wrong with a path or a value is said here, or at the head of a command, before it imports
torch and transformers, which takes seconds.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from l2r.runs.spelling import existing_path


def existing(checkpoint: Any) -> Any:
    """The folder whose name spells the same, where the one named is missing."""
    if isinstance(checkpoint, str | Path):
        path = existing_path(checkpoint)
        return checkpoint if path == Path(checkpoint) else type(checkpoint)(path)
    return checkpoint and [existing(one) for one in checkpoint]


def must_exist(param: typer.CallbackParam, paths: Any) -> Any:
    """The path, or the paths, of an option. Raises ValueError where there is nothing."""
    for path in paths if isinstance(paths, list) else [paths]:
        if path is not None and not Path(path).exists():
            raise ValueError(f"{param.name} must be a file or a folder that exists; got {path}")
    return paths


def images_or_path(param: typer.CallbackParam, source: str | None) -> str | None:
    """Data that a command reads. Raises ValueError for no built-in images and no path."""
    from l2r.training.recipes import BUILT_IN_IMAGES

    if source in (None, *BUILT_IN_IMAGES) or Path(source).expanduser().exists():
        return source
    raise ValueError(
        f"{param.name} must be a file or a folder that exists, {' or '.join(BUILT_IN_IMAGES)}; "
        f"got {source}"
    )


def at_least(least: int) -> Callable[[typer.CallbackParam, int | None], int | None]:
    """A callback that refuses a smaller number, and names it."""

    def check(param: typer.CallbackParam, value: int | None) -> int | None:
        if value is not None and value < least:
            raise ValueError(f"{param.name} must be >= {least}; got {value}")
        return value

    return check


def _device(name: str) -> str:
    from l2r.machine import device_name

    return device_name(name)


Changes = Annotated[list[str] | None, typer.Argument(help="key.sub=value ...")]
RouterChanges = Annotated[
    list[str] | None,
    typer.Argument(
        help="router.kind=l2r_sips rank=8 ...: the new router (default: preset=evidence)."
    ),
]
Recipe = Annotated[str, typer.Argument(help="Packaged recipe (see l2r train --list) or YAML path.")]
NEW_FOLDER = typer.Option("--out", help="New folder for the checkpoint.")
Seeds = Annotated[int, typer.Option(help="Seeds, from the recipe's on.", min=1)]
Layers = Annotated[str | None, typer.Option(help="Indices like 0,3,5 (default: all).")]
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
Data = Annotated[
    str | None,
    typer.Option(
        help="File or folder of text, or token files (default: the embedded corpus); of images "
        "digits, fashion-mnist or a folder (default: the run's own).",
        callback=images_or_path,
    ),
]
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
    from l2r.routers import RouterConfig
    from l2r.routers.preset import preset_router
    from l2r.training.recipes import read_change

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
        raise ValueError(f"layers must be 'all' or indices like 0,3,5; got {text!r}") from None
