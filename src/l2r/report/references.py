"""References of the numbers of a diagnosis: even use or chance, runs of ours, the paper's tables.

A reference is no limit: no study says from which value on a model is worse.
"""

from collections.abc import Mapping
from typing import NamedTuple

from l2r.files.diagnosis import Diagnosis
from l2r.report.tables import Table
from l2r.report.verdicts import span

COUNTS = ("dead_experts", "first_experts", "distinct_paths")  # whole numbers of a layer or a model
FLIPS = "tokens that change experts in bf16"
_MOST = 4  # checkpoints with a column of their own


class Reference(NamedTuple):
    """number: as pages call it. field: of a diagnosis; empty for what another command measures.

    even: of routing that is even, random or unchanged. runs: of ours. paper: of its tables.
    """

    number: str
    field: str
    even: str | None = None
    runs: str | None = None
    paper: str | None = None


REFERENCES = (
    Reference("load entropy", "entropy", "1: an even load", "0.967 to 0.998"),
    Reference("max / mean", "max_over_mean", "1: an even load", "1.20 to 1.79"),
    Reference("MaxVio", "maxvio", "0: an even load", "0.20 to 0.79"),
    Reference("dead experts", "dead_experts", "0", "0; 1 in one layer of one run"),
    Reference(
        "experts ever first", "first_experts", None, "all 16; about 9 with L2R as published"
    ),
    Reference("routing gain", "routing_gain", "0: random experts", "0.24 to 1.58 nats"),
    Reference("margin / spread", "scale_free_margin", None, "0.26 to 0.87"),
    Reference(
        "stability", "stability", "1: no change", "0.959 to 0.994",
        "0.974 linear, 0.985 L2R (SIPS), H = 1",
    ),
    Reference(
        "top-k overlap", "topk_overlap", "1: no change", "0.965 to 0.990",
        "0.968 linear, 0.992 L2R (SIPS), H = 1",
    ),
    Reference(
        FLIPS, "", "0: no change",
        "3.1% to 3.6% linear, 4.2% to 4.7% L2R tuned, 11.8% to 15.1% L2R as published",
    ),
    Reference("mean margin, low-margin rate", "", "no reference: units of scorings differ"),
)  # fmt: skip
RUNS = (
    "Small runs of ours: linear, X-MoE and L2R, as published and tuned, in 4 layers of 16 experts, "
    "4 per token: 60 runs of 3.28M tokens (`results/evidence/decision`), in bf16 24 of 1.02M "
    "(`flips`, `flips-decision`). The paper: OLMoE, noise 0.02, its table of routing robustness. A "
    "reference is no limit: nobody has shown from which value on a model is worse."
)
_COLUMNS = ("even or unchanged", "small runs of ours", "the paper")


def reference_table() -> Table:
    """Every reference, as docs/diagnostics.md shows them."""
    rows = tuple((row.number, row.even, row.runs, row.paper) for row in REFERENCES)
    return Table("", ("number", *_COLUMNS), rows)


def health_table(views: Mapping[str, Diagnosis]) -> Table:
    """Numbers of the checkpoints beside their references; of many the least and the most.

    Means over layers; counts are whole, from the least of a layer to the most.
    """
    numbers = {name: view.numbers() for name, view in views.items()}
    rows = []
    for row in REFERENCES:
        values = [found.get(row.field) for found in numbers.values()]
        if all(value is None for value in values):
            continue
        shown = [whole(view, row.field) for view in views.values()]
        if len(views) > _MOST:
            known = [value for value in values if value is not None]
            ends = [values.index(end(known)) for end in (min, max)]
            shown = [f"{_text(shown[place])} ({list(views)[place]})" for place in ends]
        rows.append((row.number, *shown, row.even, row.runs, row.paper))
    names = tuple(views) if len(views) <= _MOST else ("least", "most")
    return Table("", ("number", *names, *_COLUMNS), tuple(rows), RUNS, digits=3)


def whole(view: Diagnosis, field: str) -> float | int | str | None:
    """Return a number of a checkpoint: a mean over layers, or the span of a count."""
    value: float | None = view.numbers().get(field)
    if field not in COUNTS or value is None:
        return value
    by_layer = [int(row[field]) for row in view.layers if row.get(field) is not None]
    return span(by_layer) if by_layer else int(value)


def _text(value: float | int | str | None) -> str:
    return Table("", (), (), digits=3).show(value)
