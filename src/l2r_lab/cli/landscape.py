"""``l2r landscape``: the score explorer, and the paper's score landscapes below it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from l2r.cli.options import (
    CHECKPOINT,
    Layers,
    Open,
    Revision,
    TrustRemoteCode,
    existing,
    out_option,
    read_layers,
)
from l2r.errors import InputError
from l2r.files.wording import named_path

if TYPE_CHECKING:
    from l2r.report.page import Section

_FLAT_ANCHOR, _SWEEP_ANCHOR = (2.0, 2.0), (-2.0, 0.0)
_DRAWS = 8
REACH = 4.0
_LEAST, _MOST = 1e-3, 1e6  # of reach; beyond them fp32 squares and a figure's ticks end


def landscape(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            help=f"{CHECKPOINT}: whose anchors of rank 2 to take.",
            callback=existing,
        ),
    ] = None,
    layers: Layers = None,
    seed: Annotated[
        int, typer.Option(help=f"Seed: of drawn anchors; the page adds the next {_DRAWS - 1}.")
    ] = 0,
    out: Annotated[Path, out_option("an HTML file")] = Path("landscape.html"),
    reach: Annotated[float, typer.Option(help="The plane is drawn to this |q1|, |q2|.")] = REACH,
    open_: Open = False,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write an interactive explorer of dot, cosine and SIPS scores over the routing plane.

    Landscape, decision regions and the first expert's probability along a circle, of drawn
    anchors, with the paper's landscapes below, or of a checkpoint's.

    Example: l2r landscape --out landscape.html
    """
    from l2r.files.atomic import check_file_place

    if not _LEAST <= reach <= _MOST:
        raise InputError(f"reach must be between {_LEAST:g} and {_MOST:g}; got {reach}")
    if not 0 <= seed < 2**63 - _DRAWS:
        raise InputError(f"seed must be between 0 and 2^63 - {_DRAWS + 1}; got {seed}")
    chosen = read_layers(layers)
    if checkpoint is None and chosen is not None:
        raise InputError(f"layers are read only with a checkpoint; got layers={layers}")
    check_file_place(out)
    folder = None
    if checkpoint is not None:
        from l2r.hf.checkpoints import local_checkpoint

        folder = local_checkpoint(checkpoint, revision=revision, code=trust_remote_code)
    from l2r.cli.console import print_pages, progress_bars

    with progress_bars() as bars:
        bars("page", 0, 3, "anchors")
        from l2r.analysis.diagnostics import anchors_of, drawn_anchors
        from l2r_lab.report.explorer import write_explorer

        if folder is None:
            sets = [drawn_anchors(seed + n) for n in range(_DRAWS)]
        else:
            sets = anchors_of(_model(folder, trust_remote_code=trust_remote_code), chosen)
        bars("page", 1, 3, "figures")
        figures = paper_landscapes(reach) if checkpoint is None else []
        bars("page", 2, 3, "writing")
        of = "" if checkpoint is None else f": {named_path(checkpoint).name}"
        title = f"Score explorer{of}"
        path = write_explorer(out, sets, title=title, reach=reach, figures=figures)
        bars("page", 3, 3)
    print_pages([path], show=open_)


def _model(folder: Path, *, trust_remote_code: bool) -> Any:
    """Language model or image classifier of a folder or a run."""
    from l2r.hf.checkpoints import is_image_classifier, load_image_classifier, load_pretrained

    load = load_image_classifier if is_image_classifier(folder) else load_pretrained
    return load(folder, trust_remote_code=trust_remote_code)


def paper_landscapes(reach: float = REACH) -> "list[Section]":
    """Figures 3 and 8: the score of a fixed anchor over the plane."""
    from l2r.analysis.diagnostics import FLAT_SCORES, SWEPT_SCORES
    from l2r.analysis.diagnostics import logit_landscape as compute
    from l2r.report.page import Section
    from l2r_lab.report.landscape import landscapes_2d, landscapes_3d

    axis, flat = compute(FLAT_SCORES, _FLAT_ANCHOR, reach=reach, points=121)
    wide_axis, sweep = compute(SWEPT_SCORES, _SWEEP_ANCHOR, reach=reach, points=61)
    return [
        Section(
            "Score over the plane, k = [2, 2]",
            "The logit of one anchor as a function of the routing query q = (q1, q2); gamma = 1, "
            "beta = 1 and p = 4 unless said otherwise. "
            "The dot product grows without bound along the anchor and its level lines are "
            "straight; SIPS saturates, and its level lines follow the direction.",
            [landscapes_2d(axis.numpy(), {n: v.numpy() for n, v in flat.items()}, _FLAT_ANCHOR)],
        ),
        Section(
            "How the query norm enters, k = [-2, 0]",
            "beta = 0 leaves only the angle, as the cosine does; a larger beta lets longer queries "
            "score higher, up to gamma (1 + beta) psi(|k|). At q = 0 the direction jumps under "
            "cosine and SIPS alike, by gamma psi(|k|) to either side.",
            [landscapes_3d(wide_axis.numpy(), {n: v.numpy() for n, v in sweep.items()})],
        ),
    ]
