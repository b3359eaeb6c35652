"""The paper's tables of sizes, costs and accuracies, in its layout."""

from collections.abc import Mapping, Sequence
from typing import Any

from l2r.files.shared_settings import PAPER_ROUTERS
from l2r.report.tables import Table
from l2r.stats.intervals import Interval, share_interval
from l2r_lab.report.verdicts import of_accuracies

# (parameters, active, of routers, of linear routers), flops of an image, flops of its routers
Counts = tuple[tuple[int, int, int, int], int, int]
_TERMINAL_TASKS = ("Overall", "MMLU", "HSwag", "BoolQ", "PIQA")
INFERENCE_ROWS = ("Linear", "L2R (Dot)-H1", "L2R (SIPS)-H1", "L2R (SIPS)-H16")
_ENDS = ("95% from", "95% to")
# A number, lower and upper end of its 95% interval.
Estimate = tuple[float, float, float]


def parameter_table(
    cells: Mapping[tuple[int, int], int], linear: int, *, cost: bool = False
) -> Table:
    """Ranks down, heads across; parameters, or multiply-adds, and their share of the linear's."""
    title, caption = "Router parameters", "All layers"
    if cost:
        title, caption = "Router cost", "Multiply-adds of matrix products for one token, all layers"
    caption += f"; in parentheses the share of the linear router's {linear:,}."
    caption += " Norms, tanh and pooling come on top." if cost else ""
    if not cost and max(cells.values()) > linear:
        caption += " Where it is above 100% a router has more parameters than the linear one in its"
        caption += " place."
    ranks = sorted({rank for rank, _ in cells})
    heads = sorted({head for _, head in cells})
    rows = tuple(
        (rank, *(show_count(cells[rank, head], linear) for head in heads)) for rank in ranks
    )
    columns = ("rank r \\ heads H", *(str(head) for head in heads))
    less = sum(count < linear for count in cells.values())
    what = "multiply-adds" if cost else "parameters"
    verdict = f"Fewer {what} than the linear router in {less} of {len(cells)} settings."
    return Table(title, columns, rows, caption=caption, verdict=verdict)


def size_table(sizes: Mapping[str, tuple[str, int, int, int, int]]) -> Table:
    """Make a row per recipe: router, all parameters, active ones, routers' and linear routers'."""
    rows = tuple(
        (name, router, total, active, show_count(own, linear))
        for name, (router, total, active, own, linear) in sizes.items()
    )
    return Table(
        "Models of the recipes",
        ("recipe", "router", "parameters", "active", "in routers"),
        rows,
        caption=(
            "Active: what one token meets, k of N experts, embeddings included. In parentheses "
            "the routers' share of what linear routers would have."
        ),
    )


def show_count(count: int, linear: int) -> str:
    """``131.072K (6.25%)`` below a million, ``1.114M (53.11%)`` above.

    Digits are rounded half to even on the exact decimal, as the paper's cells are.
    """
    share = f"({100 * count / linear:.2f}%)"
    if count >= 1_000_000:
        return f"{count / 1e6:.3f}M {share}"
    return f"{count / 1e3:.3f}K {share}"


def vit_cost_table(counts: Mapping[str, Counts]) -> Table:
    """Return counts of each router's model as a table; operations in units of 10^9 and 10^6."""
    rows = tuple(
        (name, total, active, router, flops / 1e9, router_flops / 1e6)
        for name, ((total, active, router, _), flops, router_flops) in counts.items()
    )
    return Table(
        "ViT with experts: parameters, and operations per image",
        ("router", "parameters", "active", "in routers", "GFLOPs", "router MFLOPs"),
        rows,
        caption=(
            "Active: what one token meets, k of N experts. Operations: matrix products of one "
            "forward pass, a multiply-add counted as two."
        ),
        digits=3,
    )


def inference_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Return the paper's inference table from the records of ``l2r bench inference``.

    Rows are the paper's, with the ratio of both times to the linear router's.
    """
    by_phase: dict[str, dict[str, Mapping[str, Any]]] = {"prefill": {}, "decode": {}}
    for record in records:
        by_phase[record["phase"]][record["contender"]] = record
    prefill, decode = by_phase["prefill"], by_phase["decode"]
    rows = []
    for name in (name for name in prefill if name in INFERENCE_ROWS):
        cells = [
            (row["latency_ms"], row["tokens_per_second"]) for row in (prefill[name], decode[name])
        ]
        ratios = (prefill[name]["over_linear"], decode[name]["over_linear"])
        rows.append((name, *cells[0], *cells[1], *ratios))
    first = prefill["Linear"]
    steps = ", ".join(
        f"{min(counts):,} to {max(counts):,} {phase}"
        for phase, of in by_phase.items()
        if (counts := [record["steps"] for name, record in of.items() if name in INFERENCE_ROWS])
    )
    return Table(
        "Inference overhead",
        (
            "Model",
            "Prefill latency (ms)",
            "Prefill tok/s",
            "Decode latency (ms/step)",
            "Decode tok/s",
            "Prefill / Linear",
            "Decode / Linear",
        ),
        tuple(rows),
        caption=(
            f"Size {first['size']}, batch {first['batch']}, prompt of {first['prompt']:,} tokens; "
            f"steps timed for a row: {steps}. Medians."
        ),
        digits=2,
    )


def accuracy_table(results: Mapping[str, tuple[Interval, Interval, int]]) -> Table:
    """``results`` maps a router or a run to top-1 and top-5 in per cent and the number of seeds."""
    rows = []
    for router, (top1, top5, count) in results.items():
        halves = (top1.half, top5.half) if count > 1 else (None, None)
        name = PAPER_ROUTERS.get(router, router)
        rows.append((name, top1.mean, halves[0], top5.mean, halves[1], count))
    seeds = sorted({row[-1] for row in rows})
    return Table(
        "Top-1 and top-5 accuracy",
        ("Method", "Top-1 (%)", "± top-1", "Top-5 (%)", "± top-5", "seeds"),
        tuple(rows),
        caption=seeds_caption(seeds),
        digits=2,
        best=(("Top-1 (%)", "max"), ("Top-5 (%)", "max")) if seeds[0] > 1 else (),
    )


def downstream_table(
    columns: Sequence[str],
    rows: Mapping[str, Mapping[str, Estimate | None]],
    differences: Mapping[str, Mapping[str, Estimate]],
) -> Table:
    """Accuracy of every checkpoint in percent with its interval, then every difference.

    ``rows`` maps a checkpoint to its columns; ``differences`` a pair's name to its columns, as
    shares of 1.
    """
    points = {
        name: {c: tuple(100 * value for value in estimate) for c, estimate in by_column.items()}
        for name, by_column in differences.items()
    }
    cells: list[tuple[str | float | None, ...]] = []
    for name, by_column in {**rows, **points}.items():
        for position, label in enumerate((name, *_ENDS)):
            estimates = (by_column.get(column) for column in columns)
            cells.append((label, *(None if e is None else e[position] for e in estimates)))
    caption = "MMLU is the mean of its four groups, Overall the mean of all eight tasks."
    if differences:
        caption += " Differences are over the same documents, by pairs."
    return Table(
        "Downstream accuracy (%)",
        ("Model", *columns),
        tuple(cells),
        caption,
        digits=1,
        few=(*_TERMINAL_TASKS, *columns),  # the others by their place, as far as there is room
        verdict=of_accuracies(rows, points),
    )


def images_table(record: Mapping[str, Any]) -> Table:
    """Accuracies with the intervals of shares of independent images, from evaluation.json."""
    images = record["images"]
    shares = [share_interval(round(record[top] * images), images) for top in ("top1", "top5")]
    name = record["checkpoint"] + (" (average)" if record["averaged"] else "")
    accuracies, *ends = (
        [100 * share[position] for share in shares] for position in range(len(Interval._fields))
    )
    return Table(
        "Accuracy on images (%)",
        ("Model", "Top-1 (%)", "Top-5 (%)", "CE", "images", "skipped"),
        (
            (name, *accuracies, record["ce"], images, len(record["skipped"])),
            *((label, *end, None, None, None) for label, end in zip(_ENDS, ends, strict=True)),
        ),
        digits=2,
        verdict=(
            f"{name}: {accuracies[0]:.1f}% of {images} images right, "
            f"95% interval {ends[0][0]:.1f} to {ends[1][0]:.1f}."
        ),
    )


def seeds_caption(seeds: Sequence[int]) -> str:
    """Caption that says over how many seeds the numbers of the rows are means."""
    if seeds == [1]:
        return "One seed each: differences of this size say nothing without more seeds."
    counts = "/".join(map(str, seeds))
    return f"Mean over {counts} seeds ± half of the 95% interval (Student's t)."
