"""The comparison of several runs: one table and one page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from l2r.report.analyses import analysis_sections, routing_sections
from l2r.report.curves import HEALTH_PANELS, LANGUAGE_PANELS, VISION_PANELS, curves
from l2r.report.page import Section, write_page
from l2r.report.paper_tables import accuracy_table
from l2r.report.patches import patch_sections
from l2r.report.style import ROUTER_COLORS
from l2r.report.tables import Table
from l2r.report.text_view import text_sections
from l2r.runs.diagnosis import is_diagnosed, read_diagnosis
from l2r.runs.final_losses import last_tenth
from l2r.runs.folder import SEED_MARK, RunFolder
from l2r.runs.statistics import mean_interval
from l2r.runs.text_routing import TextRouting

# column -> number of the diagnosis, and which direction is better
_ROUTING = (
    ("mean margin", "mean_margin", "max"),
    ("low-margin rate", "low_margin_rate", "min"),
    ("stability", "stability", "max"),
    ("top-k overlap", "topk_overlap", "max"),
    ("margin / spread", "scale_free_margin", "max"),
    ("load entropy", "entropy", "max"),
    ("routing gain", "routing_gain", "max"),
)

PANELS = {"tokens": LANGUAGE_PANELS, "images": VISION_PANELS}


def in_paper_order(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """Runs named after routers in the paper's order, then the others by name."""
    order = list(ROUTER_COLORS)
    last = len(order)
    return sorted(runs, key=lambda r: (order.index(r.name) if r.name in order else last, r.name))


def first_seeds(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """The runs that are not repeats of another with a different seed; all, where every one is."""
    return [run for run in runs if SEED_MARK not in run.name] or list(runs)


def accuracy_over_seeds(runs: Sequence[RunFolder]) -> list[Table]:
    """A table of accuracy, mean and interval over repeats of a run; none for language."""
    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        last = (run.read_metrics("validation") or [{}])[-1]
        if "top1" in last:
            arm = run.name.partition(SEED_MARK)[0]
            found.setdefault(arm, []).append((100 * last["top1"], 100 * last["top5"]))
    if not found:
        return []
    results = {}
    for arm, pairs in found.items():
        top1, top5 = (mean_interval(values) for values in zip(*pairs, strict=True))
        results[arm] = (top1, top5, len(pairs))
    return [accuracy_table(results)]


def comparison_table(runs: Sequence[RunFolder]) -> Table:
    """One row per run: validation CE per domain, balance, routing metrics, router parameters."""
    last = {run.name: (run.read_metrics("validation") or [{}])[-1] for run in runs}
    first = next(iter(last.values()), {})
    domains = [key for key in first if key.startswith("ce/")]
    accuracies = [key for key in ("top1", "top5") if key in first]
    columns: list[tuple[str, str]] = [(accuracy, "max") for accuracy in accuracies]
    columns += [(f"CE {d.removeprefix('ce/')}", "min") for d in domains] + [("balance loss", "min")]
    columns += [(name, better) for name, _, better in _ROUTING] + [("router params", "min")]
    rows = []
    for run in runs:
        mean = read_diagnosis(run.path).numbers() if is_diagnosed(run.path) else {}
        rows.append(
            (
                run.name,
                *(last[run.name].get(field) for field in (*accuracies, *domains)),
                last_tenth(run, "balance"),
                *(mean.get(field) for _, field, _ in _ROUTING),
                run.read_json(run.environment).get("router_parameters"),
            )
        )
    return Table(
        "Routers compared",
        ("router", *(name for name, _ in columns)),
        tuple(rows),
        caption=(
            "CE: validation cross-entropy in nats per token; top1, top5: share of validation "
            "images whose label is among the first guesses. Balance loss: mean over the last "
            "tenth of training, k when balanced. Margins are gaps between the two largest "
            "logits; raw gaps of different scorings are not comparable, margin / spread divides "
            "by the standard deviation of a token's logits. Stability and overlap: under noise "
            "of sigma 0.02 on router inputs. Routing gain: rise of the cross-entropy, in nats, "
            "with random experts. Routing metrics are means over layers."
        ),
        best=tuple(columns),
    )


def write_report(
    every: Sequence[RunFolder],
    path: Path,
    *,
    more: Sequence[Section] = (),
    reload: float | None = None,
) -> tuple[Table, Path]:
    """Write the page of one run or several; the first table of it, and the path.

    Repeats with other seeds count in the accuracies alone; ``more`` goes before the facts. The
    page of a run that goes on looks for a newer one every ``reload`` seconds.
    """
    runs = first_seeds(every)
    tables = [*accuracy_over_seeds(every), comparison_table(runs)]
    facts = {run.name: run.read_json(run.environment) for run in runs}
    views = {run.name: read_diagnosis(run.path) for run in runs if is_diagnosed(run.path)}
    unit = unit_of(runs)
    lines = {run.name: [run] for run in runs}
    texts = {run.name: TextRouting.read(run.text) for run in runs if run.text.is_file()}
    sections = [
        *text_sections(texts, path),
        Section("Result", parts=tables),
        Section(
            "Training",
            "Every run starts from the same weights outside its router and sees the same batches.",
            [curves(lines, PANELS[unit], unit)],
        ),
        Section(
            "Routing health", "Worst layer of every run.", [curves(lines, HEALTH_PANELS, unit)]
        ),
    ]
    if views:
        sections += [*routing_sections(views), *analysis_sections(views, details=False)]
    sections += [*patch_sections(runs), *more, Section("Runs", parts=[facts_table(facts)])]
    seen = max((run.read_metrics("train") or [{}])[-1].get(unit, 0) for run in runs)
    parameters = facts[runs[0].name].get("parameters", 0)
    summary = f"{len(runs)} run(s) of a model with {parameters:,} parameters, {seen:,} {unit} each."
    if reload is not None:
        summary += f" Still training; this page reloads every {reload:g} s."
    title = "l2r: routers compared"
    write_page(path, title=title, summary=summary, sections=sections, reload=reload)
    return tables[0], path


def unit_of(runs: Sequence[RunFolder]) -> str:
    """What the runs count their progress in: tokens or images."""
    record = (runs[0].read_metrics("train") or [{}])[0]
    return "images" if "images" in record else "tokens"


def facts_table(facts: dict[str, dict[str, Any]]) -> Table:
    """One row per run: sizes, versions, device and command."""
    rows = []
    for name, fact in facts.items():
        packages = fact.get("packages", {})
        rows.append(
            (
                name,
                fact.get("parameters"),
                fact.get("router_parameters"),
                packages.get("torch"),
                packages.get("transformers"),
                fact.get("threads"),
                ", ".join(fact.get("gpus", [])) or "CPU",
                fact.get("command"),
            )
        )
    columns = ("run", "parameters", "router parameters", "torch", "transformers", "threads")
    return Table("", (*columns, "device", "command"), tuple(rows))
