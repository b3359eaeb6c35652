"""Draw docs/images/gap-by-tokens.png: L2R's loss less linear's over the tokens seen.

    PYTHONPATH=. python -m scripts.pages.gap_by_tokens

Points are validation losses at the end of every study's runs, lines training losses within the
runs of one study for each number of experts. Needs l2r-moe[browser] and Chromium or Chrome.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import NamedTuple

import plotly.graph_objects as go

from l2r.report.style import layout
from scripts.pages.evidence_numbers import BEST, PLAIN, gaps, interval, runs

WINDOW = 256_000  # tokens over which a line is averaged
BATCH = 2048  # tokens of a step, in every study
COLORS = {"16": "#009e73", "64": "#b8860b", "256": "#d1495b", "1,024": "#3d6fb4"}


class Study(NamedTuple):
    """A study's tuned L2R and linear arms. shift: of its points, in tokens, so that none hides."""

    experts: str
    name: str
    l2r: str
    linear: str
    shift: int = 0


LONG = Study("256", "tokens-256", "l2r-4m", "linear-4m")
STUDIES = (
    Study("16", "decision", *BEST, -90_000),
    Study("16", "width-256", *BEST, -30_000),
    Study("64", "experts-64", *BEST, 30_000),
    Study("64", "experts-64-width-256", *BEST, 90_000),
    Study("64", "ranked-64", *PLAIN, -240_000),
    Study("64", "ranked-64", "preset", "linear", -180_000),
    Study("256", "rank-8-of-256", *PLAIN, -120_000),
    Study("256", "experts-256", *PLAIN, -60_000),
    Study("256", "rivals-256", *PLAIN),
    Study("256", "transfer", *PLAIN, 60_000),
    Study("256", "tokens-256", "l2r-1m", "linear-1m", 120_000),
    LONG,
    Study("1,024", "experts-1024", *PLAIN, 180_000),
    Study("1,024", "experts-1024", "l2r-rank-32", "linear", 240_000),
    Study("1,024", "ranked-1024", *PLAIN, 300_000),
)
LINES = (STUDIES[0], STUDIES[2], LONG, STUDIES[-1])


def line(study: Study) -> tuple[list[float], list[float]]:
    """Millions of tokens seen and the mean gap in training loss, over equal parts of the runs."""
    arms = [runs(study.name)[arm] for arm in (study.l2r, study.linear)]
    by_seed = []
    for seed in sorted(set(arms[0]) & set(arms[1])):
        pairs = zip(*(arm[seed].curve for arm in arms), strict=True)
        by_seed.append([own - base for (_, own), (_, base) in pairs])
    steps = [step for step, _ in next(iter(arms[0].values())).curve]
    parts = max(1, round(steps[-1] * BATCH / WINDOW))
    bounds = [len(steps) * n // parts for n in range(parts + 1)]
    spans = list(pairwise(bounds))
    middles = [fmean(steps[first:last]) * BATCH / 1e6 for first, last in spans]
    return middles, [fmean(g for gap in by_seed for g in gap[slice(*span)]) for span in spans]


def figure(studies: Sequence[Study] = STUDIES) -> go.Figure:
    """Draw the lines, then the points with their 95% intervals."""
    chart = go.Figure()
    chart.add_hline(y=0, line={"color": "#555", "width": 1.5})
    for study in LINES:
        tokens, gap = line(study)
        color = COLORS[study.experts]
        chart.add_scatter(
            x=tokens, y=gap, mode="lines",
            line={"color": color, "width": 4 if study is LONG else 2},
            name=f"{study.experts} experts", legendgroup=study.experts,
        )  # fmt: skip
    for study in studies:
        found = interval(gaps(study.name, study.l2r, study.linear))
        one = next(iter(runs(study.name)[study.l2r].values()))
        color, large = COLORS[study.experts], study is LONG
        chart.add_scatter(
            x=[(one.facts["units"] + study.shift) / 1e6],
            y=[found.mean],
            error_y={"type": "data", "array": [found.half], "thickness": 2.5 if large else 1.2},
            mode="markers",
            marker={"color": color, "size": 13 if large else 8},
            text=[study.name],
            showlegend=False,
        )
    end = interval(gaps(LONG.name, LONG.l2r, LONG.linear))
    end_seeds = len(runs(LONG.name)[LONG.l2r])
    chart.add_annotation(
        x=4.35, y=-0.1, xanchor="right", yanchor="bottom", showarrow=False, align="right",
        text="points: validation loss at the end, 95%<br>lines: training loss within the runs",
        font={"size": 12, "color": "#777"},
    )  # fmt: skip
    words = {"showarrow": False, "font": {"size": 14, "color": "#444"}, "xanchor": "left"}
    chart.add_annotation(x=1.5, y=0.1, text="↑ L2R is worse than linear", **words)
    chart.add_annotation(x=1.5, y=-0.06, text="↓ L2R is better", **words)
    chart.add_annotation(
        x=3.95, y=end.mean, xanchor="right", yanchor="bottom", showarrow=False, align="right",
        text=f"<b>256 experts: {end.mean:+.3f}</b><br>{end_seeds} seeds",
        font={"size": 14, "color": COLORS["256"]},
    )  # fmt: skip
    chart.update_xaxes(title_text="tokens seen, millions", range=[0, 4.35], dtick=1)
    chart.update_yaxes(title_text="loss of L2R - loss of linear, nats", range=[-0.1, 0.11])
    legend = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    chart.update_layout(**layout(wide=860, height=460, width=860, legend=legend))
    chart.update_layout(paper_bgcolor="white", plot_bgcolor="white", font={"color": "#333"})
    return chart


def main() -> None:
    """Write the picture."""
    from scripts.pages import pictures

    with TemporaryDirectory() as folder:
        page = Path(folder) / "figure.html"
        figure().write_html(page)
        out = pictures.IMAGES / "gap-by-tokens.png"
        pictures.figure(page, out, "tokens seen")
        pictures.small(out)


if __name__ == "__main__":
    main()
