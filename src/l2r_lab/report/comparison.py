"""The comparison of several runs: one table and one page."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from l2r.files.arrays import PatchRouting, TextRouting
from l2r.files.diagnosis import is_diagnosed, read_diagnosis
from l2r.files.final_losses import last_tenth
from l2r.files.folder import SEED_MARK, RunFolder
from l2r.report.analyses import analysis_sections, routing_sections
from l2r.report.page import Section, write_page
from l2r.report.palette import ROUTER_COLORS
from l2r.report.passages import first_passages
from l2r.report.patches import compare_patches, patch_sections
from l2r.report.tables import Table
from l2r.report.text_view import text_page_of, text_sections
from l2r.report.verdicts import ever_first, span
from l2r.stats.intervals import mean_interval
from l2r_lab.files.progress import read_progress
from l2r_lab.report.comparable_runs import results_to_compare
from l2r_lab.report.curves import HEALTH_PANELS, LANGUAGE_PANELS, VISION_PANELS, curve_sections
from l2r_lab.report.paper_tables import accuracy_table
from l2r_lab.report.task_accuracies import task_accuracies
from l2r_lab.report.verdicts import of_runs

# column -> number of the diagnosis
_ROUTING = {
    "mean margin": "mean_margin",
    "low-margin rate": "low_margin_rate",
    "stability": "stability",
    "top-k overlap": "topk_overlap",
    "margin / spread": "scale_free_margin",
    "load entropy": "entropy",
    "experts ever first": "ever_first",
    "routing gain": "routing_gain",
}
_TERMINAL_COLUMNS = (  # in this order, those that hold a value, as many as fit
    "top1",
    "CE mean",
    "stability",
    "load entropy",
    "experts ever first",
    "routing gain",
    "router params",
)

_OF_TASK = {
    "tokens": "CE: validation cross-entropy in nats per token.",
    "images": "top1, top5: share of validation images whose label is among the first guesses.",
}
_CAPTION = (
    "Balance loss: mean over the last tenth of training, k when balanced. Margins are gaps between "
    "the two largest logits; margin / spread divides by the standard deviation of a token's "
    "logits, because raw gaps of different scorings have different units. Stability and overlap: "
    "under noise of sigma 0.02 on router inputs. Experts ever first: least and most over the "
    "layers. Routing gain: rise of the cross-entropy, in nats, with random experts. Other routing "
    "metrics are means over layers."
)
_BRIEF_CAPTION = (
    "Stability: share of tokens that keep their first expert under noise of sigma 0.02 on router "
    "inputs. Load entropy: 1 is an even load. Experts ever first: least and most over the layers. "
    "Routing gain: nats that random experts would cost."
)
_COLUMNS = 8  # of the table on a first screen
_TEXTS = 3  # colored side by side
_IMAGES = 2
_SAME_START = "Every run starts from the same weights outside its router and sees the same batches."
_NOT_THE_SAME = "Runs differ in their seed, data, model or batch."

PANELS = {"tokens": LANGUAGE_PANELS, "images": VISION_PANELS}


def in_paper_order(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """Return runs named after routers, or recipes, in the paper's order, then others by name."""
    order = {name: place for place, name in enumerate(ROUTER_COLORS)}

    def place(run: RunFolder) -> tuple[int, str]:
        return order.get(_arm(run).replace("-", "_"), len(order)), run.name

    return sorted(runs, key=place)


def first_seeds(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """List the runs that repeat no other with another seed; all of an arm that has none of them."""
    first = {run.name for run in runs if SEED_MARK not in run.name}
    return [run for run in runs if run.name in first or _arm(run) not in first]


def _arm(run: RunFolder) -> str:
    return run.name.partition(SEED_MARK)[0]


def accuracy_over_seeds(runs: Sequence[RunFolder]) -> list[Table]:
    """Tabulate accuracy, mean and interval over ended repeats of a run; none for language."""
    accuracies: dict[str, list[tuple[float, float]]] = {}
    unfinished = []
    for run in runs:
        last = (run.read_metrics("validation") or [{}])[-1]
        if not read_progress(run).ended:
            unfinished.append(run.name)
        elif "top1" in last:
            accuracies.setdefault(_arm(run), []).append((100 * last["top1"], 100 * last["top5"]))
    if not accuracies:
        return []
    results = {}
    for arm, pairs in accuracies.items():
        top1, top5 = (mean_interval(values) for values in zip(*pairs, strict=True))
        results[arm] = (top1, top5, len(pairs))
    table = accuracy_table(results)
    note = f" Unfinished and not counted: {', '.join(unfinished)}." if unfinished else ""
    return [replace(table, caption=table.caption + note)]


def comparison_table(runs: Sequence[RunFolder], *, brief: bool = False) -> Table:
    """One row per run: validation CE per domain, balance, routing metrics, router parameters.

    ``brief``: eight columns and three digits.

    Runs that have ended are compared at their ends. The others have no results then; where
    none has ended, all are compared at the last place that all have validated. Nothing is marked
    best: a row is one seed.
    """
    progress = [read_progress(run) for run in runs]
    records, notes = results_to_compare(runs, progress)
    last = [(run.read_metrics("validation") or [{}])[-1] for run in runs]
    fields = dict.fromkeys(field for record in last for field in record)
    domains = [field for field in fields if field.startswith("ce/")]
    accuracies = [field for field in ("top1", "top5") if field in fields]
    columns = [*accuracies, *(f"CE {d.removeprefix('ce/')}" for d in domains), "balance loss"]
    columns += [*_ROUTING, "router params"]
    rows, undiagnosed = [], []
    for run, state, record in zip(runs, progress, records, strict=True):
        mean = {}
        if state.ended and is_diagnosed(run.path):
            view = read_diagnosis(run.path)
            mean = {**view.numbers(), "ever_first": span(ever_first(view))}
        elif state.ended:
            undiagnosed.append(run.path)
        rows.append(
            (
                run.name,
                state.step if state.ended else str(state),
                *(record.get(field) for field in (*accuracies, *domains)),
                last_tenth(run, "balance", end=record["step"]) if record else None,
                *(mean.get(field) for field in _ROUTING.values()),
                run.read_json(run.environment).get("router_parameters"),
            )
        )
    if undiagnosed:
        command = shlex.join(["l2r", "diagnose", *map(str, undiagnosed)])
        out = shlex.quote(str(undiagnosed[0].parent))
        notes.append(f"`{command} --out {out}` fills the columns of routing that are empty.")
    about = _OF_TASK[unit_of(runs)]
    whole = Table(
        "Routers compared",
        ("router", "steps", *columns),
        tuple(rows),
        caption=" ".join([*notes, about, _CAPTION]),
        few=_TERMINAL_COLUMNS,
    )
    if not brief:
        return whole
    caption = " ".join([*notes, about, _BRIEF_CAPTION])
    return replace(whole.brief(most=_COLUMNS), caption=caption)


def write_report(
    every: Sequence[RunFolder], path: Path, *, reload: float | None = None
) -> tuple[Table, list[Path]]:
    """Write the page of one run or several; its first table, and the pages: itself, its text.

    Repeats with other seeds count in the accuracies alone. The page of a run that goes on looks for
    a newer one every ``reload`` seconds.
    """
    runs = first_seeds(every)
    verdict = of_runs(in_paper_order(every))
    views = {run.name: read_diagnosis(run.path) for run in runs if is_diagnosed(run.path)}
    unit = unit_of(runs)
    lines = {run.name: [run] for run in runs}
    texts = {run.name: TextRouting.read(run.text) for run in runs if run.text.is_file()}
    alike = _SAME_START if _start_alike(runs) else _NOT_THE_SAME
    lead = [*_pictures(runs, texts, path), comparison_table(runs, brief=True)]
    whole, over_seeds = comparison_table(runs), accuracy_over_seeds(every)
    accuracies = [*over_seeds, *task_accuracies(every)]
    sections = [Section("Accuracy", parts=accuracies)] if accuracies else []
    more = [
        Section("All numbers", parts=[replace(whole, title="")]),
        *curve_sections("Training", alike, lines, PANELS[unit], unit),
        *curve_sections("Routing health", "Worst layer of every run.", lines, HEALTH_PANELS, unit),
    ]
    if views:
        more += [*routing_sections(views), *analysis_sections(views, details=False)]
    more += [*patch_sections(runs), Section("Runs", parts=[facts_table(runs)])]
    sections += [replace(section, folded=True) for section in more]
    progress = {run.name: read_progress(run) for run in runs}
    sizes = [run.read_json(run.environment).get("parameters", 0) for run in runs]
    seen = _span([state.seen for state in progress.values()])
    summary = f"{len(runs)} run(s) of a model with {_span(sizes)} parameters, {seen} {unit} each."
    late = [f"{name} (step {state})" for name, state in progress.items() if not state.ended]
    if late:
        summary += f" Unfinished: {', '.join(late)}."
    if reload is not None:
        summary += f" Still training; this page reloads every {reload:g} s."
    title = "l2r: routers compared"
    write_page(
        path,
        title=title,
        summary=summary,
        sections=sections,
        verdict=verdict,
        lead=lead,
        reload=reload,
    )
    first = replace([*over_seeds, whole][0], verdict=verdict.says)
    return first, [path, *([text_page_of(path)] if texts else [])]


def _pictures(runs: Sequence[RunFolder], texts: Mapping[str, TextRouting], path: Path) -> list[Any]:
    """Show what the routers do: text in the colors of experts, or images under their patches."""
    if texts:
        (section,) = text_sections(texts, path)
        (link,) = section.parts
        say = f"Open the whole text of {len(texts)} router{'s' * (len(texts) > 1)}, layer by layer"
        return [first_passages(_few(texts, runs)), replace(link, text=say)]
    routings = {run.name: PatchRouting.read(run.patches) for run in runs if run.patches.is_file()}
    first = next(iter(routings.values()), None)
    if first is None:
        return []
    alike = {n: r for n, r in routings.items() if np.array_equal(first.images, r.images)}
    return [compare_patches(dict(list(alike.items())[:_TEXTS]), images=_IMAGES)]


def _few(texts: Mapping[str, TextRouting], runs: Sequence[RunFolder]) -> dict[str, TextRouting]:
    """Keep the first of many texts and those of the lowest and of the highest loss."""
    if len(texts) <= _TEXTS:
        return dict(texts)
    last = {run.name: (run.read_metrics("validation") or [{}])[-1] for run in runs}
    losses = {name: last[name].get("ce/mean", math.inf) for name in texts}
    by_loss = sorted(
        (name for name in texts if math.isfinite(losses[name])), key=losses.__getitem__
    )
    shown = {next(iter(texts)), *by_loss[:1], *by_loss[-1:]}
    return {name: text for name, text in texts.items() if name in shown}


def unit_of(runs: Sequence[RunFolder]) -> str:
    """Return unit in which the runs count their progress: tokens or images."""
    return read_progress(runs[0]).unit


def facts_table(runs: Sequence[RunFolder]) -> Table:
    """One row per run: how far it is, sizes, versions, device and command."""
    unit = unit_of(runs)
    rows = []
    for run in runs:
        fact, state = run.read_json(run.environment), read_progress(run)
        packages = fact.get("packages", {})
        rows.append(
            (
                run.name,
                state.step if state.ended else str(state),
                state.seen,
                fact.get("parameters"),
                fact.get("router_parameters"),
                packages.get("torch"),
                packages.get("transformers"),
                fact.get("threads"),
                ", ".join(fact.get("gpus", [])) or "CPU",
                fact.get("command"),
            )
        )
    columns = ("run", "steps", unit, "parameters", "router parameters", "torch", "transformers")
    return Table("", (*columns, "threads", "device", "command"), tuple(rows))


def _start_alike(runs: Sequence[RunFolder]) -> bool:
    """Tell whether runs share the seed of their weights and their batches."""
    recipes = [run.read_recipe() for run in runs]
    parts = [
        {
            **{field: recipe.get(field) for field in ("seed", "data", "model")},
            "batch": (recipe.get("training") or {}).get("global_batch"),
        }
        for recipe in recipes
    ]
    return all(part == parts[0] for part in parts)


def _span(numbers: Sequence[int]) -> str:
    """Return the number that all share, or the least and the largest."""
    least, most = min(numbers), max(numbers)
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"
