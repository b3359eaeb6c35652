"""``l2r landscape``: score landscapes of the scoring rules as a page."""

from pathlib import Path
from typing import Annotated

import typer

_FLAT_ANCHOR, _SWEEP_ANCHOR = (2.0, 2.0), (-2.0, 0.0)


def landscape(
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("landscape.html"),
    reach: Annotated[float, typer.Option(help="The plane is drawn to this |q1|, |q2|.")] = 4.0,
) -> None:
    """Draw the score of a fixed anchor over the routing plane: dot, cosine and SIPS.

    Example: l2r landscape --out landscape.html
    """
    from l2r.diagnostics.landscape import FLAT, SWEEP
    from l2r.diagnostics.landscape import landscape as compute
    from l2r.report.landscape import landscapes_2d, landscapes_3d
    from l2r.report.page import Section, write_page

    if reach <= 0:
        raise ValueError(f"reach must be > 0; got {reach}")
    axis, flat = compute(FLAT, _FLAT_ANCHOR, reach=reach, points=121)
    wide_axis, sweep = compute(SWEEP, _SWEEP_ANCHOR, reach=reach, points=61)
    sections = [
        Section(
            "Score over the plane, k = [2, 2]",
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
    path = write_page(
        out,
        title="Score landscapes",
        summary="Logit of one anchor as a function of the routing query q = (q1, q2); gamma = 1, "
        "beta = 1 and p = 4 unless said otherwise.",
        sections=sections,
    )
    typer.echo(f"wrote {path}")
