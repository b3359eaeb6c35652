"""Options and arguments that several commands have: one name, one meaning, declared once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from l2r.runs.spelling import existing_path


def _device(name: str) -> str:
    from l2r.machine import pick_device

    return pick_device(name)


def existing(checkpoint: Any) -> Any:
    """The folder whose name spells the same, where the one named is missing."""
    if isinstance(checkpoint, str | Path):
        path = existing_path(checkpoint)
        return checkpoint if path == Path(checkpoint) else type(checkpoint)(path)
    return checkpoint and [existing(one) for one in checkpoint]


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
    Path, typer.Argument(help=f"{CHECKPOINT}.", callback=existing, show_default=False)
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
        "digits, fashion-mnist or a folder (default: the run's own)."
    ),
]
Rows = Annotated[
    int, typer.Option(help="Rows of text over all domains, at least one of each; or images.")
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
