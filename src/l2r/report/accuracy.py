"""Accuracy of image classifiers over seeds, in the layout of the paper's ImageNet table."""

from collections.abc import Mapping, Sequence

from l2r.report.tables import Table
from l2r.routers.names import PAPER_ROUTERS

# Mean and the half width of its interval, both in per cent.
Spread = tuple[float, float]


def accuracy_table(results: Mapping[str, tuple[Spread, Spread, int]]) -> Table:
    """``results`` maps a router to its top-1, its top-5 and the number of seeds."""
    rows = [
        (PAPER_ROUTERS.get(router, router), *top1, *top5, seeds)
        for router, (top1, top5, seeds) in results.items()
    ]
    seeds = sorted({row[-1] for row in rows})
    return Table(
        "Top-1 and top-5 accuracy",
        ("Method", "Top-1 (%)", "± top-1", "Top-5 (%)", "± top-5", "seeds"),
        tuple(rows),
        caption=_caption(seeds),
        digits=2,
        best=(("Top-1 (%)", "max"), ("Top-5 (%)", "max")),
    )


def _caption(seeds: Sequence[int]) -> str:
    if seeds == [1]:
        return "One seed each: differences of this size say nothing without more seeds."
    return "Mean over seeds ± half of the 95% interval (Student's t)."
