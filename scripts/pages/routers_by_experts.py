"""Write the table of routers by number of experts in results/evidence/README.md.

    PYTHONPATH=. python -m scripts.pages.routers_by_experts

Its figure is one of pictures.py.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go

from l2r.report.palette import router_color
from l2r.report.style import layout
from l2r.stats.intervals import Interval, mean_interval, mean_or_nan
from l2r_lab.files.study import Study
from l2r_lab.studies.judging import StudyPlaces, results_of, study_of
from l2r_lab.studies.registration import read_plan
from scripts.pages.marks import with_section

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "results" / "evidence"
PAGE = STORED / "README.md"
SECTION = "routers by experts"
TIMES = ROOT / "results" / "router-time.md"
HEAD = (
    "| router | validation CE | - linear | verdict | tokens bf16 changes | parameters | time |\n"
    "|---|---|---|---|---|---|---|\n"
)
TUNED = {"linear-best": "linear", "l2r-best": "L2R, rank 8, 4 anchors"}
# study: its sizes, and a name for every arm; the first arm is linear
STUDIES = {
    "decision": ("16", {**TUNED, "xmoe-best": "X-MoE"}),
    "width-256": ("16, width 256", TUNED),
    "experts-64": ("64", TUNED),
    "ranked-64": (
        "64",
        {
            "linear": "linear",
            "l2r": "L2R, rank 16",
            "preset": "L2R, rank 8, 4 anchors",
            "xmoe": "X-MoE, rank 8",
        },
    ),
    "rank-8-of-256": (
        "256",
        {
            "linear": "linear",
            "l2r": "L2R, rank 8",
            "xmoe": "X-MoE, rank 8",
            "low-rank": "low-rank linear, rank 8",
        },
    ),
    "experts-256": (
        "256",
        {
            "linear": "linear",
            "l2r": "L2R, rank 32",
            "xmoe": "X-MoE, rank 32",
            "low-rank": "low-rank linear, rank 32",
        },
    ),
    "rivals-256": (
        "256",
        {
            "linear": "linear",
            "l2r": "L2R, rank 8",
            "product-keys-16": "product keys, 16 numbers",
            "product-keys-8": "product keys, 8 numbers",
            "sigmoid-loss-free": "sigmoid, loss-free",
            "linear-loss-free": "linear, loss-free",
            "l2r-loss-free": "L2R, loss-free",
        },
    ),
    "transfer": (
        "256, other text, width 256, six layers",
        {
            "linear": "linear",
            "l2r": "L2R, rank 8",
            "l2r-rank-32": "L2R, rank 32",
            "xmoe": "X-MoE, rank 8",
        },
    ),
    "ranked-1024": (
        "1,024",
        {"linear": "linear", "l2r": "L2R, rank 32", "xmoe": "X-MoE, rank 32"},
    ),
    "experts-1024": (
        "1,024",
        {
            "linear": "linear",
            "l2r": "L2R, rank 8",
            "l2r-rank-32": "L2R, rank 32",
            "xmoe": "X-MoE, rank 8",
            "low-rank-32": "low-rank linear, rank 32",
            "product-keys-16": "product keys, 16 numbers",
        },
    ),
}
SYMBOLS = {"16": "circle", "64": "square", "256": "diamond", "1,024": "triangle-up"}


@dataclass(frozen=True)
class Arm:
    """Results of an arm, and their difference from the linear router of its study.

    seeds: their number. router: name of the router. loss: mean validation loss, nats. gap:
    difference of losses, paired by seed, None for linear. verdict: verdict of the plan's contrast.
    flips: share of tokens that bf16 changes. parameters: number over all layers. time: ratio to
    linear's, as text.
    """

    study: str
    seeds: int
    sizes: str
    router: str
    loss: float
    gap: Interval | None
    verdict: str
    flips: float | None
    parameters: int | None
    time: str


def main() -> None:
    """Rewrite the table of the page."""
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_section(page, SECTION, table(list(all_arms()))), encoding="utf-8")


def all_arms() -> Iterator[Arm]:
    """Arms of all studies, in the order of the table."""
    for name in STUDIES:
        yield from arms_of(name, study_in_results(name))


def study_in_results(name: str) -> Study:
    """The study as it is kept in results/evidence."""
    registered = read_plan(name)
    cells = registered.plan.cells(registered.plan.seeds.most)
    places = StudyPlaces(STORED / name, ROOT / "runs")
    return study_of(registered, results_of(registered, cells, places), places.ended())


def arms_of(name: str, study: Study) -> Iterator[Arm]:
    """Arms of one study, linear first."""
    sizes, routers = STUDIES[name]
    times, linear = router_times(), next(iter(routers))
    for arm, router in routers.items():
        flips = study.values(arm, "flipped_tokens")
        gap, verdict = (None, "") if arm == linear else difference(study, arm, linear)
        yield Arm(
            study=name,
            seeds=study.seeds,
            sizes=sizes,
            router=router,
            loss=mean_or_nan(study.values(arm, "validation_ce")),
            gap=gap,
            verdict=verdict,
            flips=mean_or_nan(flips) if flips else None,
            parameters=study.router_parameters(arm),
            time=times.get((name, arm), ""),
        )


def difference(study: Study, arm: str, linear: str) -> tuple[Interval, str]:
    """The arm's loss less linear's with its interval, and the verdict of the plan's contrast.

    A pair that the plan does not contrast has the plain paired interval and no verdict.
    """
    for judged in study.judged:
        contrast = judged.contrast
        if (contrast.first, contrast.second, contrast.metric) == (arm, linear, "validation_ce"):
            return judged.difference, judged.says(".3f")
    own, base = (study.values(name, "validation_ce") for name in (arm, linear))
    return mean_interval([a - b for a, b in zip(own, base, strict=True)]), "not in the plan"


def router_times() -> dict[tuple[str, str], str]:
    """A router's time over linear's by study and arm, from results/router-time.md."""
    row = r"^\| ([\w-]+) \| [^|]+ \| ([\w-]+) \|[^|]+\|[^|]+\| ([\d.]+) \("
    lines = re.findall(row, TIMES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {(study, arm): ratio for study, arm, ratio in lines}


def table(arms: list[Arm]) -> str:
    """The table as Markdown: a row with the study, then one per router."""
    rows = []
    for arm in arms:
        gap = arm.gap
        if gap is None:
            experts, _, rest = arm.sizes.partition(", ")
            sizes = f"**{experts} experts**" + (f", {rest}" if rest else "")
            rows.append(f"| {sizes}, `{arm.study}`, {arm.seeds} seeds | | | | | | |\n")
        cells = (
            arm.router,
            f"{arm.loss:.3f}",
            f"{gap.mean:+.3f}±{gap.half:.3f}" if gap else "",
            arm.verdict,
            "" if arm.flips is None else f"{arm.flips:.1%}",
            f"{arm.parameters:,}" if arm.parameters else "",
            arm.time,
        )
        rows.append("|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n")
    return HEAD + "".join(rows)


def figure(arms: list[Arm]) -> go.Figure:
    """Losses less linear's against router parameters over linear's; color by family.

    Arms whose balance alone differs are left out.
    """
    families = ("L2R", "X-MoE", "low-rank linear", "product keys", "sigmoid")
    colors = ("l2r_sips", "xmoe", "low_rank", "product_keys", "sigmoid")
    linear: dict[str, int] = {}  # parameters by study
    chart = go.Figure()
    named = set()
    for arm in arms:
        family = arm.router.partition(",")[0]
        if arm.gap is None:
            linear[arm.study] = arm.parameters or 0
            continue
        if arm.router in ("linear, loss-free", "L2R, loss-free") or not arm.parameters:
            continue
        position = families.index(family)
        color = router_color(colors[position], position)
        experts = arm.sizes.partition(", ")[0]
        chart.add_scatter(
            x=[arm.parameters / linear[arm.study]],
            y=[arm.gap.mean],
            error_y={"type": "data", "array": [arm.gap.half], "thickness": 1.2},
            text=[f"{arm.study}: {arm.router}"],
            mode="markers",
            marker={"color": color, "size": 9, "symbol": SYMBOLS[experts]},
            name=f"{family}, {experts} experts",
            showlegend=(family, experts) not in named,
        )
        named.add((family, experts))
    chart.add_hline(y=0, line={"color": router_color("linear"), "width": 1.5})
    ticks = (0.05, 0.1, 0.2, 0.5, 1)
    chart.update_xaxes(
        type="log",
        title_text="router parameters over linear's",
        tickvals=ticks,
        ticktext=[f"{tick:g}" for tick in ticks],
    )
    chart.update_yaxes(title_text="validation CE - linear, nats")
    legend = {"orientation": "h", "y": -0.25, "x": 0, "yanchor": "top"}
    chart.update_layout(**layout(wide=520, height=560, legend=legend))
    return chart


if __name__ == "__main__":
    main()
