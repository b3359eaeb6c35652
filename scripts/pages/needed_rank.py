"""Write the table of ranks by number of experts in results/evidence/README.md.

    PYTHONPATH=. python -m scripts.pages.needed_rank

Its figure is one of pictures.py.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from l2r.report.palette import INK, router_color
from l2r.report.style import layout
from l2r.stats.intervals import mean_or_nan
from l2r_lab.files.study import Study
from scripts.pages.marks import with_section
from scripts.pages.routers_by_experts import PAGE, study_in_results

SECTION = "ranks by experts"
RANKS = (2, 8, 16, 32, 64)
MARGIN = 0.02  # of the plan's rule
SEEDS = 2  # of needed-rank; the others' first two
# 1,024 experts: rank -> study and arm
THOUSAND = {
    8: ("experts-1024", "l2r"),
    16: ("rivals-1024", "l2r-rank-16"),
    32: ("experts-1024", "l2r-rank-32"),
    64: ("rivals-1024", "l2r-rank-64"),
}


@dataclass(frozen=True)
class Ranks:
    """Of one number of experts: mean validation loss by rank, of linear, and router parameters."""

    experts: int
    losses: Mapping[int, float]
    linear: float
    parameters: Mapping[int, int]
    linear_parameters: int

    @property
    def needed(self) -> int:
        """The least rank whose mean is at most the margin above that of rank 64."""
        return min(r for r, loss in self.losses.items() if loss <= self.losses[64] + MARGIN)


def ranks() -> list[Ranks]:
    """All numbers of experts, from the studies as they are kept in results/evidence."""
    names = ("needed-rank", "experts-1024", "rivals-1024")
    studies = {name: study_in_results(name) for name in names}
    found = [
        _ranks(
            experts,
            studies,
            {r: ("needed-rank", f"rank-{r}-of-{experts}") for r in RANKS},
            ("needed-rank", f"linear-{experts}"),
        )
        for experts in (16, 64, 256)
    ]
    return [*found, _ranks(1024, studies, THOUSAND, ("experts-1024", "linear"))]


def _ranks(
    experts: int,
    studies: Mapping[str, Study],
    arms: Mapping[int, tuple[str, str]],
    linear: tuple[str, str],
) -> Ranks:
    def loss(study: str, arm: str) -> float:
        return mean_or_nan(studies[study].values(arm, "validation_ce")[:SEEDS])

    def parameters(study: str, arm: str) -> int:
        return studies[study].router_parameters(arm) or 0

    return Ranks(
        experts,
        {rank: loss(*place) for rank, place in arms.items()},
        loss(*linear),
        {rank: parameters(*place) for rank, place in arms.items()},
        parameters(*linear),
    )


def table(all_ranks: list[Ranks]) -> str:
    """The table as Markdown: losses, the needed rank, and linear's loss."""
    lines = [
        "| experts | " + " | ".join(f"rank {rank}" for rank in RANKS) + " | linear | needed |",
        "|---" * (len(RANKS) + 3) + "|",
    ]
    for one in all_ranks:
        losses = " | ".join(f"{one.losses[r]:.3f}" if r in one.losses else "" for r in RANKS)
        lines.append(f"| {one.experts:,} | {losses} | {one.linear:.3f} | {one.needed} |")
    return "\n".join(lines) + "\n"


def figure(all_ranks: list[Ranks]) -> go.Figure:
    """Left: every rank that ran, and the needed one; right: its router parameters and linear's."""
    titles = ("rank (validation CE above the best rank, nats)", "router parameters of the model")
    chart = make_subplots(cols=2, subplot_titles=titles, horizontal_spacing=0.12)
    experts = [one.experts for one in all_ranks]
    color = router_color("l2r_sips")
    for one in all_ranks:
        least = min(one.losses.values())
        chart.add_scatter(
            x=[one.experts] * len(one.losses),
            y=list(one.losses),
            text=[f"{loss - least:+.3f}" for loss in one.losses.values()],
            mode="markers+text",
            textposition="bottom right",
            marker={"color": INK, "size": 6},
            showlegend=False,
            col=1,
            row=1,
        )
    needed = [one.needed for one in all_ranks]
    line = {"color": color, "width": 2}
    chart.add_scatter(
        x=experts, y=needed, name="needed rank", mode="lines+markers", line=line,
        marker={"size": 12, "symbol": "circle-open", "line": {"width": 2.5}}, row=1, col=1,
    )  # fmt: skip
    chart.add_scatter(
        x=experts, y=[one.parameters[one.needed] for one in all_ranks], line=line,
        name="L2R of the needed rank", mode="lines+markers", row=1, col=2,
    )  # fmt: skip
    chart.add_scatter(
        x=experts, y=[one.linear_parameters for one in all_ranks], name="linear",
        mode="lines+markers", line={"color": router_color("linear"), "width": 2}, row=1, col=2,
    )  # fmt: skip
    ticks = {"tickvals": experts, "ticktext": [f"{n:,}" for n in experts]}
    wide = [math.log10(12), math.log10(2600)]
    chart.update_xaxes(type="log", title_text="experts", range=wide, **ticks)
    ranks_shown = {"tickvals": RANKS, "ticktext": [str(rank) for rank in RANKS]}
    chart.update_yaxes(type="log", title_text="rank", row=1, col=1, **ranks_shown)
    chart.update_yaxes(type="log", dtick=1, row=1, col=2)
    legend = {"orientation": "h", "y": -0.22, "x": 0, "yanchor": "top"}
    chart.update_layout(**layout(wide=760, height=440, legend=legend))
    return chart


def main() -> None:
    """Rewrite the table of the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_section(page, SECTION, table(ranks())), encoding="utf-8")


if __name__ == "__main__":
    main()
