"""The colors of every page: by expert, router, domain and layer; a gray for both themes."""

import colorsys
from collections.abc import Sequence

from l2r.files.shared_settings import PAPER_ROUTERS
from l2r.files.wording import known_as

# Of texts and lines inside of figures: readable on white and on the dark page.
INK = "#7b8794"

# Okabe and Ito's hues, one per router.
_ROUTERS = (INK, "#56b4e9", "#e69f00", "#cc79a7", "#009e73", "#d55e00")
ROUTER_COLORS = dict(zip(PAPER_ROUTERS, _ROUTERS, strict=True))
_TITLES = {title: router for router, title in PAPER_ROUTERS.items()}
_ALIASES = {"l2r": "l2r_sips"}  # as plans call them
# Of a router that was tuned: far from all routers, found like the colors of experts below.
_TUNED = ("#8080e0", "#c04040", "#c0a0a0", "#806080", "#60c080", "#a020e0")
TUNED_COLORS = dict(zip(PAPER_ROUTERS, _TUNED, strict=True))
_TUNINGS = ("tuned", "best")
_SPARE = ("#0072b2", "#e04060", "#008060", "#8060a0", "#80a0c0", "#c04000")

# Sixteen colors, far apart for normal sight, protanopia, deuteranopia and tritanopia: found by
# farthest-point search on a grid of sRGB; tests/report/test_palette.py has the distances.
EXPERTS = (
    "#40809f", "#ffdf40", "#9f6000", "#bfdfff", "#600080", "#4000ff", "#204000", "#60bf80",
    "#df8020", "#9f60ff", "#808060", "#800040", "#bf9fff", "#20ffbf", "#df9fbf", "#006060",
)  # fmt: skip

# Sixteen domains: readable on both pages, and far from the first four experts.
DOMAINS = (
    "#40a080", "#c0a040", "#a0a0e0", "#60a0a0", "#2060e0", "#e04060", "#60c080", "#c04080",
    "#408060", "#8080e0", "#40c0a0", "#408040", "#c0a0c0", "#008080", "#a08020", "#e000a0",
)  # fmt: skip

# Green better, orange worse, blue equivalent, gray neither.
VERDICT_COLORS = {
    "better": "#009e73",
    "worse": "#d55e00",
    "equivalent": "#0072b2",
    "no verdict": INK,
}


def router_of(name: str) -> str | None:
    """Find the router that a run, an arm or a contender is named after; None without one.

    ``l2r-sips``, ``l2r_sips.seed-1`` and ``l2r_sips_tuned`` are of l2r_sips, ``l2r-best`` and
    the paper's ``L2R (SIPS)`` too.
    """
    if name in _TITLES:
        return _TITLES[name]
    plain, names = _plain(name), (*ROUTER_COLORS, *_ALIASES)
    whole = known_as(plain, names)
    if whole not in names:
        under = plain.replace("-", "_")
        whole = max((r for r in names if under.startswith(f"{r}_")), key=len, default="")
    if "," in name or not whole:
        return None
    return _ALIASES.get(whole, whole)


def router_color(name: str, position: int = 0) -> str:
    """Color of a router, and another one where it was tuned.

    Other variants and other names take a spare color by their position.
    """
    router = router_of(name)
    if router is not None and _is_published(name):
        return ROUTER_COLORS[router]
    if router is not None and _plain(name).endswith(_TUNINGS):
        return TUNED_COLORS[router]
    return _SPARE[position % len(_SPARE)]


def _plain(name: str) -> str:
    """Name without its folder and its seed."""
    return name.partition(".")[0].partition("/")[-1] or name.partition(".")[0]


def _is_published(name: str) -> bool:
    names = (*ROUTER_COLORS, *_ALIASES)
    return name in _TITLES or known_as(_plain(name), names) in names


def expert_colors(count: int) -> list[str]:
    """Choose a color per expert: sixteen far apart; of more, one hue per cluster of neighbors.

    Experts of a cluster differ in lightness, and figures say the number on hover.
    """
    if count <= len(EXPERTS):
        return list(EXPERTS[:count])
    each = -(-count // len(EXPERTS))
    return [_lightened(EXPERTS[e // each], e % each, each) for e in range(count)]


def layer_colors(depth: int) -> list[str]:
    """Color the layers along Viridis, first to last, without its ends, which fade on a page."""
    from plotly.colors import sample_colorscale

    ends = [0.3 + 0.45 * n / max(1, depth - 1) for n in range(depth)]
    return list(sample_colorscale("Viridis", ends))


def ink_on(color: str) -> str:
    """Black or white, whichever has the larger contrast on a color."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    luminance = sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


def stepped(colors: Sequence[str]) -> list[list[float | str]]:
    """Make a color scale of plotly with one flat part per color."""
    scale: list[list[float | str]] = []
    for number, color in enumerate(colors):
        scale += [[number / len(colors), color], [(number + 1) / len(colors), color]]
    return scale


def _lightened(color: str, step: int, steps: int) -> str:
    """Change the lightness of a color; one step and the next are far apart, dark next to light."""
    step = step // 2 + (step % 2) * -(-steps // 2)
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, light, strength = colorsys.rgb_to_hls(red, green, blue)
    low = min(max(0.16, light - 0.25), 0.38)
    light = low + 0.5 * step / max(1, steps - 1)
    parts = colorsys.hls_to_rgb(hue, light, strength)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)
