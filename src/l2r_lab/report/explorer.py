"""The score explorer: one page without a server, explorer.html with its scripts and its style."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from l2r.report.page import Section, section_html, write_script_page
from l2r.report.palette import ROUTER_COLORS, expert_colors

# Of level lines' blue over white to red, as in its landscapes (ColorBrewer's RdBu).
_DIVERGING = ("#2166ac", "#67a9cf", "#d1e5f0", "#f7f7f7", "#fddbc7", "#ef8a62", "#b2182b")


def write_explorer(
    path: Path,
    sets: Sequence[dict[str, Any]],
    *,
    title: str,
    reach: float,
    figures: Sequence[Section] = (),
) -> Path:
    """Write the page: sliders over ``sets`` of anchors, and sections with figures below.

    A set has ``name``, ``anchors`` [N][H][2], the ``settings`` that its sliders start with and,
    where its anchors are drawn, ``spreads`` [N][H]: log |k| is their product with a slider.
    """
    experts = max(len(one["anchors"]) for one in sets)
    rules = {rule: ROUTER_COLORS[f"l2r_{rule}"] for rule in ("sips", "cosine", "dot")}
    data = {
        "sets": sets,
        "reach": reach,
        "colors": expert_colors(experts),
        "diverging": _DIVERGING,
        "rules": rules,
    }
    (_, below), drawing = section_html(figures)
    scores = ("explorer_scores",)
    return write_script_page(
        path,
        "explorer",
        title=title,
        data=data,
        libraries=scores,
        figures=below,
        drawing=drawing,
        package="l2r_lab.report",
    )
