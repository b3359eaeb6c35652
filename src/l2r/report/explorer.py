"""The score explorer: one page without a server, explorer.html with its scripts and its style."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from l2r.report.page import Section, section_html
from l2r.report.script_page import write_script_page
from l2r.report.style import ROUTER_COLORS, expert_colors

# Of level lines' blue over white to red, as in the landscapes beside it (ColorBrewer's RdBu).
_DIVERGING = ("#2166ac", "#67a9cf", "#d1e5f0", "#f7f7f7", "#fddbc7", "#ef8a62", "#b2182b")
_FEW = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#0072b2", "#d55e00", "#f0e442", "#8a8f98")


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
        "colors": _colors(experts),
        "diverging": _DIVERGING,
        "rules": rules,
    }
    below = section_html(figures)
    scores = ("explorer_scores",)
    return write_script_page(
        path, "explorer", title=title, data=data, libraries=scores, figures=below
    )


def _colors(experts: int) -> list[str]:
    """Colors that the color-blind tell apart for up to eight experts, hues for more.

    Regions carry the expert's number as well.
    """
    return [*_FEW, *expert_colors(experts)[len(_FEW) :]][:experts]
