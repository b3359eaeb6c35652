"""Options and arguments that several commands have: one name, one meaning, declared once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from l2r.routers import RouterConfig


def _device(name: str) -> str:
    from l2r.machine import pick_device

    return pick_device(name)


Changes = Annotated[list[str] | None, typer.Argument(help="key.sub=value ...")]
RouterChanges = Annotated[
    list[str] | None,
    typer.Argument(help="router.kind=l2r_sips rank=8 ...: the new router (default: l2r_sips)."),
]
Recipe = Annotated[str, typer.Argument(help="Packaged recipe (see l2r train --list) or YAML path.")]
NEW_FOLDER = typer.Option("--out", help="New folder for the checkpoint.")
Seeds = Annotated[int, typer.Option(help="Seeds, from the recipe's on.", min=1)]
Layers = Annotated[str | None, typer.Option(help="Indices like 0,3,5 (default: all).")]
BatchSize = Annotated[int, typer.Option(help="Rows, answers or images per forward pass.")]
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
        help="Layers over devices and disk, as accelerate does: auto, balanced, sequential or the "
        "JSON of a dictionary (default: one device; auto where a CPU's memory is too small)."
    ),
]
CHECKPOINT = "Hugging Face folder, run folder or hub id"
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run the Python code that the checkpoint's folder brings."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print records as JSON.")]


def read_router(changes: Sequence[str] | None) -> "RouterConfig":
    """The router that ``router.kind=xmoe rank=8 ...`` describes: l2r_sips unless it says another.

    Raises ValueError for unknown names, fields and values.
    """
    from l2r.routers import RouterConfig
    from l2r.training.recipes.changes import read_change

    options: dict[str, Any] = {"kind": "l2r_sips"}
    for change in changes or ():
        field, value = read_change(change)
        options[field.removeprefix("router.")] = value
    return RouterConfig.from_dict(options)


def read_layers(text: str | None) -> list[int] | None:
    """Layer indices from ``"0,3,5"``; None for ``all`` or nothing. Raises ValueError otherwise."""
    if text is None or text == "all":
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"layers must be 'all' or indices like 0,3,5; got {text!r}") from None
