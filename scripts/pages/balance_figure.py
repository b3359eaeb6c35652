"""Draw docs/images/balancing.svg from results/balancing.jsonl, and its table in docs/your-loop.md.

    PYTHONPATH=. python -m scripts.others.balance_runs
    PYTHONPATH=. python -m scripts.pages.balance_figure

A panel for each family and layer: MaxVio over steps, the mean over seeds and their range.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.pages.evidence_numbers import interval
from scripts.pages.marks import with_section

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "balancing.jsonl"
FIGURE, PAGE, MARK = ROOT / "docs" / "images" / "balancing.svg", "your-loop.md", "balancing"
ARMS = {
    "plain": ("nothing", "#b3541e"),
    "loss": ("balance loss 0.01", "#7a7a7a"),
    "bias": ("bias balancing", "#0b6fa4"),
}
PLACES = {
    "deepseek_v3": "a buffer of the router",
    "ernie4_5_moe": "a module in the router",
    "lfm2_moe": "a buffer of the block",
}
WIDTH, HEIGHT, LEFT, TOP, GAP_X, GAP_Y = 250, 120, 56, 106, 26, 40
SMOOTH = 5  # points of the curve that one of the figure is the mean of
Cell = dict[str, Any]
Points = list[tuple[float, float]]


def cells(way: str = "Trainer") -> list[Cell]:
    """Results of one way to train; of the Trainer those seeds that have every arm."""
    found = [json.loads(line) for line in RESULTS.read_text("utf-8").splitlines()]
    arms: dict[tuple[str, int], set[str]] = {}
    for cell in found:
        if cell["way"] == "Trainer":
            arms.setdefault((cell["family"], cell["seed"]), set()).add(cell["arm"])
    return [
        cell
        for cell in found
        if cell["way"] == way and len(arms[cell["family"], cell["seed"]]) == len(ARMS)
    ]


def layers(found: Sequence[Cell], family: str) -> list[str]:
    """Names of the routed layers of a family."""
    return sorted(next(c for c in found if c["family"] == family)["maxvio"])


def curve(cell: Cell, layer: str) -> Points:
    """Step and MaxVio of a layer, means over a few points."""
    points = [(point["step"], point["maxvio"][layer]) for point in cell["curve"]]
    bounds = [*range(0, len(points), SMOOTH), len(points)]
    parts = [points[a:b] for a, b in pairwise(bounds) if b > a]
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]


def panel(found: Sequence[Cell], column: int, row: int, top: float) -> Iterator[str]:
    """One layer of a family."""
    family = list(PLACES)[column]
    layer = layers(found, family)[row]
    left, upper = LEFT + column * (WIDTH + GAP_X), TOP + row * (HEIGHT + GAP_Y)
    steps = max(cell["steps"] for cell in found)

    def at(point: tuple[float, float]) -> str:
        across = left + WIDTH * point[0] / steps
        return f"{across:.1f},{upper + HEIGHT * (1 - min(point[1], top) / top):.1f}"

    yield f'<rect x="{left}" y="{upper}" width="{WIDTH}" height="{HEIGHT}" class="frame"/>'
    yield f'<text x="{left + 6}" y="{upper + HEIGHT - 7}" class="layer">layer {layer}</text>'
    for value in range(int(top) + 1):
        y = upper + HEIGHT * (1 - value / top)
        yield f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        if column == 0:
            yield f'<text x="{left - 6}" y="{y + 4:.1f}" class="tick end">{value}</text>'
    for step in (0, steps // 2, steps):
        x = left + WIDTH * step / steps
        yield f'<text x="{x:.1f}" y="{upper + HEIGHT + 15}" class="tick middle">{step}</text>'
    for arm, (_, color) in ARMS.items():
        runs = [c for c in found if (c["family"], c["arm"]) == (family, arm)]
        lines = [curve(cell, layer) for cell in runs]
        if not lines:
            continue
        columns = [x for x, _ in lines[0]]
        values = list(zip(*([y for _, y in line] for line in lines), strict=True))
        low = [at((x, min(v))) for x, v in zip(columns, values, strict=True)]
        high = [at((x, max(v))) for x, v in zip(columns, values, strict=True)]
        mean = [at((x, fmean(v))) for x, v in zip(columns, values, strict=True)]
        yield f'<polygon points="{" ".join([*high, *low[::-1]])}" fill="{color}" class="band"/>'
        yield f'<polyline points="{" ".join(mean)}" class="line" stroke="{color}"/>'


def svg(found: Sequence[Cell], title: str) -> str:
    """The whole figure."""
    rows = max(len(layers(found, family)) for family in PLACES)
    width = LEFT + len(PLACES) * (WIDTH + GAP_X)
    height = TOP + rows * (HEIGHT + GAP_Y)
    peaks = [y for c in found for layer in c["maxvio"] for _, y in curve(c, layer)]
    top = max(peaks) * 1.05
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif" role="img" aria-label="{title}">',
        "<style>.frame{fill:none;stroke:#999}.grid{stroke:#eee}.head{font-size:13px;"
        "font-weight:600}.title{font-size:16px;font-weight:700}.tick{font-size:10px;fill:#555}"
        ".layer{font-size:11px;fill:#555}.end{text-anchor:end}"
        ".middle{text-anchor:middle}.band{opacity:.2}.line{fill:none;stroke-width:2.2}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="12" y="24" class="title">{title}</text>',
    ]
    for number, (words, color) in enumerate(ARMS.values()):
        x = 12 + 172 * number
        parts.append(
            f'<line x1="{x}" x2="{x + 20}" y1="45" y2="45" class="line" stroke="{color}"/>'
        )
        parts.append(f'<text x="{x + 26}" y="49" class="head" fill="{color}">{words}</text>')
    about = "y: largest load over mean load, less 1; x: step; band: seeds"
    parts.append(f'<text x="{width - 26}" y="49" class="tick end">{about}</text>')
    for column, (family, place) in enumerate(PLACES.items()):
        x = LEFT + column * (WIDTH + GAP_X)
        parts.append(f'<text x="{x}" y="{TOP - 22}" class="head">{family}</text>')
        parts.append(f'<text x="{x}" y="{TOP - 8}" class="tick">bias: {place}</text>')
        for row in range(len(layers(found, family))):
            parts += panel(found, column, row, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def violation(found: Sequence[Cell], family: str, arm: str) -> list[float]:
    """MaxVio on the held-out text, mean over layers, by seed."""
    return [fmean(c["maxvio"].values()) for c in by_seed(found, family, arm)]


def by_seed(found: Sequence[Cell], family: str, arm: str) -> list[Cell]:
    """Cells of an arm in the order of their seeds."""
    arms = [c for c in found if (c["family"], c["arm"]) == (family, arm)]
    return sorted(arms, key=lambda c: int(c["seed"]))


def table(found: Sequence[Cell]) -> Iterable[str]:
    """A row for each family and arm."""
    yield "| family, where the bias is | arm | MaxVio | held-out CE | less nothing's, 95% |"
    yield "|---|---|---|---|---|"
    for family, place in PLACES.items():
        base = [c["ce"] for c in by_seed(found, family, "plain")]
        for arm, (words, _) in ARMS.items():
            own = [c["ce"] for c in by_seed(found, family, arm)]
            gap = ""
            if arm != "plain":
                of = interval([a - b for a, b in zip(own, base, strict=True)])
                side = (
                    "undecided" if of.low <= 0 <= of.high else "lower" if of.high < 0 else "higher"
                )
                gap = f"{of.mean:+.4f} ({of.low:+.4f} to {of.high:+.4f}), {side}"
            name = f"{family}, {place}" if arm == "plain" else ""
            peak = fmean(violation(found, family, arm))
            yield f"| {name} | {words} | {peak:.2f} | {fmean(own):.4f} | {gap} |"


def headline(found: Sequence[Cell]) -> str:
    """The outcome in a line, from the numbers."""

    def of(arm: str) -> list[float]:
        return [fmean(violation(found, family, arm)) for family in PLACES]

    plain = of("plain")

    def shares(arm: str) -> str:
        found = sorted(after / before for before, after in zip(plain, of(arm), strict=True))
        return f"{found[0]:.0%} to {found[-1]:.0%}"

    return f"Bias balancing cuts overload to {shares('bias')}, a balance loss to {shares('loss')}"


def loop_agrees() -> str:
    """How far the loop written out is from the Trainer, where both ran."""
    own = {c["seed"]: c for c in cells("loop")}
    by = {c["seed"]: c for c in by_seed(cells(), "deepseek_v3", "bias")}
    both = sorted(own.keys() & by.keys())
    gaps = [abs(own[s]["ce"] - by[s]["ce"]) for s in both]
    if not both:
        return "not run"
    most = max(gaps)
    return f"{'equal to the bit' if most == 0 else f'off by {most:.1e}'}, {len(both)} seeds"


def main() -> None:
    """Write the figure and the table."""
    found = cells()
    FIGURE.write_text(svg(found, headline(found)), "utf-8")
    steps = max(cell["steps"] for cell in found)
    text = "\n".join(table(found))
    count = min(len(by_seed(found, family, "bias")) for family in PLACES)
    section = (
        f"![{headline(found)}](images/balancing.svg)\n\n{text}\n\n"
        "MaxVio is on held-out text, the mean over layers; 0 is perfect balance. Models of 3 "
        f"layers, width 64, 16 experts (2 chosen), trained from random weights for {steps} steps "
        f"of 512 tokens of the demo's text in `Trainer`, {count} seeds, speed 0.001; undecided is "
        "not equal. "
        "The same in a loop written out "
        f"(deepseek_v3): held-out CE is {loop_agrees()}. "
        "`python -m scripts.others.balance_runs` trains them.\n"
    )
    page = ROOT / "docs" / PAGE
    page.write_text(with_section(page.read_text("utf-8"), MARK, section), "utf-8")


if __name__ == "__main__":
    main()
