"""Joins runs of image classifiers with the figures that only they have."""

from collections.abc import Sequence

from l2r.data.run_folder import RunFolder
from l2r.report.page import Section
from l2r.report.tables import Table


def accuracy_over_seeds(runs: Sequence[RunFolder]) -> Table | None:
    """Accuracy per router, mean and interval over its runs; None without image classifiers."""
    from l2r.diagnostics.intervals import mean_interval
    from l2r.report.accuracy import accuracy_table

    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        last = (run.read_metrics("validation") or [{}])[-1]
        if "top1" in last:
            router = str(run.read_json(run.environment).get("router", run.name))
            found.setdefault(router, []).append((100 * last["top1"], 100 * last["top5"]))
    if not found:
        return None
    results = {}
    for router, pairs in found.items():
        top1, top5 = (mean_interval(values) for values in zip(*pairs, strict=True))
        first, five = ((i.mean, i.high - i.mean) for i in (top1, top5))
        results[router] = (first, five, len(pairs))
    return accuracy_table(results)


def vision_sections(runs: Sequence[RunFolder]) -> list[Section]:
    """Accuracy table and patch figures; empty for runs of language models."""
    from l2r.report.patches import class_figure, patch_figure, read_patch_routing

    table = accuracy_over_seeds(runs)
    sections = [] if table is None else [Section("Accuracy", parts=[table])]
    for run in first_seeds(runs):
        if run.patches.is_file():
            routing = read_patch_routing(run.patches)
            text = "Colour: the expert with the largest weight. Point at a patch to see them all."
            parts = [patch_figure(routing), class_figure(routing)]
            sections.append(Section(f"Patches and experts: {run.name}", text, parts))
    return sections


def first_seeds(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """The runs that are not repeats of another with a different seed."""
    return [run for run in runs if SEED_MARK not in run.name]


SEED_MARK = ".seed-"
