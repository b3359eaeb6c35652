"""Draw docs/images/growth.svg from results/growth.json, and print the slopes as Markdown.

    python -m scripts.machines.growth
    python scripts/pages/growth_figure.py

A panel for each size that grows, both axes logarithmic. Lines are measured, dashes the physical
limit.
"""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Colors of the pages' palette (report/palette.py), dark enough on white.
COLORS = {
    "router": "#0b6fa4",
    "layer": "#b3541e",
    "step": "#2e7d32",
    "diagnosis": "#7b3fa0",
    "mismatch": "#a3123f",
    "memory": "#555555",
}
TITLES = {
    "T": "T, tokens",
    "N": "N, experts",
    "d": "d, hidden size",
    "r": "r, rank",
    "H": "H, anchors per expert",
    "layers": "layers",
}
WIDTH, HEIGHT, LEFT, TOP, GAP_X, GAP_Y = 210, 190, 48, 64, 74, 62
LOW, HIGH = -3, 5  # powers of ten
Points = list[tuple[float, float]]


def slope(points: Points) -> float:
    """Of a straight line through the logarithms, by least squares."""
    xs, ys = ([math.log(p[i]) for p in points] for i in (0, 1))
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / sum(
        (x - mean_x) ** 2 for x in xs
    )


def panel(number: int, axis: str, lines: dict[str, tuple[Points, Points]]) -> Iterable[str]:
    """One size: its frame, its ticks, and a line and dashes for every quantity."""
    left = LEFT + number % 3 * (WIDTH + GAP_X)
    top = TOP + number // 3 * (HEIGHT + GAP_Y)
    values = [x for x, _ in next(iter(lines.values()))[0]]
    span = math.log(values[-1] / values[0])

    def at(x: float, y: float) -> tuple[float, float]:
        across = left + WIDTH * math.log(x / values[0]) / span
        up = (math.log10(y) - LOW) / (HIGH - LOW)
        return across, top + HEIGHT * (1 - up)

    yield f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" class="frame"/>'
    yield f'<text x="{left}" y="{top - 8}" class="title">{TITLES[axis]}</text>'
    for power in range(LOW, HIGH + 1):
        y = at(values[0], 10.0**power)[1]
        yield f'<line x1="{left}" x2="{left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        if number % 3 == 0:
            label = f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"
            place = f'x="{left - 6}" y="{y + 4:.1f}"'
            yield f'<text {place} class="tick" text-anchor="end">{label}</text>'
    for x in values:
        across = at(x, 1)[0]
        yield (
            f'<text x="{across:.1f}" y="{top + HEIGHT + 15}" class="tick" '
            f'text-anchor="middle">{x:,}</text>'
        )
    ends = {name: at(*measured[-1])[1] for name, (measured, _) in lines.items()}
    labels = spread(ends, 12, top + 6, top + HEIGHT)
    for name, (measured, limit) in lines.items():
        for points, style in ((limit, "limit"), (measured, "measured")):
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in points))
            yield f'<polyline points="{path}" class="{style}" stroke="{COLORS[name]}"/>'
        yield (
            f'<text x="{left + WIDTH + 4}" y="{labels[name] + 4:.1f}" class="slope" '
            f'fill="{COLORS[name]}">{slope(measured):.2f}</text>'
        )


def spread(ends: dict[str, float], apart: float, low: float, high: float) -> dict[str, float]:
    """Heights of labels near the ends of their lines, none on another."""
    placed: dict[str, float] = {}
    last = low - apart
    for name in sorted(ends, key=ends.__getitem__):
        last = placed[name] = max(ends[name], last + apart)
    over = last - high
    for name in reversed(list(placed)):
        if over <= 0:
            break
        placed[name] -= over
        below = [y for other, y in placed.items() if other != name and y < placed[name] + over]
        over = max([apart - (placed[name] - y) for y in below], default=0.0)
    return placed


def svg(panels: dict[str, dict[str, tuple[Points, Points]]]) -> str:
    """The whole figure."""
    width = LEFT + 3 * WIDTH + 2 * GAP_X + 44
    height = TOP + 2 * HEIGHT + GAP_Y + 26
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" role="img" '
        'aria-label="How time and memory grow with each size">',
        "<style>.frame{fill:none;stroke:#999}.grid{stroke:#e6e6e6}.title{font-size:13px;"
        "font-weight:600}.tick{font-size:10px;fill:#555}.slope{font-size:11px;font-weight:600}"
        ".measured{fill:none;stroke-width:2}.limit{fill:none;stroke-width:1.2;"
        "stroke-dasharray:4 3}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<text x="12" y="18" class="tick">ms of one thread; memory in MiB. '
        "Dashes: physical limit. Right: slope of the line</text>",
    ]
    for number, (name, color) in enumerate(COLORS.items()):
        x = 12 + 96 * number
        parts.append(
            f'<line x1="{x}" x2="{x + 18}" y1="33" y2="33" class="measured" stroke="{color}"/>'
        )
        parts.append(f'<text x="{x + 23}" y="37" class="slope" fill="{color}">{name}</text>')
    for number, (axis, lines) in enumerate(panels.items()):
        parts += panel(number, axis, lines)
    return "\n".join([*parts, "</svg>"]) + "\n"


def table(panels: dict[str, dict[str, tuple[Points, Points]]]) -> Iterable[str]:
    """Slopes, measured and of the limit, as Markdown."""
    yield f"| slope over | {' | '.join(COLORS)} |"
    yield "|---" * (len(COLORS) + 1) + "|"
    for axis, lines in panels.items():
        cells = [f"{slope(lines[n][0]):.2f} ({slope(lines[n][1]):.2f})" for n in COLORS]
        yield f"| {TITLES[axis]} | {' | '.join(cells)} |"


def read(records: Sequence[dict[str, float]]) -> dict[str, dict[str, tuple[Points, Points]]]:
    panels: dict[str, dict[str, tuple[Points, Points]]] = {}
    for record in records:
        axis, name = str(record["axis"]), str(record["quantity"])
        measured, limit = panels.setdefault(axis, {}).setdefault(name, ([], []))
        measured.append((record["value"], record["measured"]))
        limit.append((record["value"], record["limit"]))
    return panels


def main() -> None:
    found = json.loads((ROOT / "results" / "growth.json").read_text("utf-8"))
    panels = read(found["records"])
    (ROOT / "docs" / "images" / "growth.svg").write_text(svg(panels), "utf-8")
    print("\n".join(table(panels)))


if __name__ == "__main__":
    main()
