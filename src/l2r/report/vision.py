"""Joins runs of image classifiers with the figures that only they have."""

from collections.abc import Sequence

from l2r.report.page import Section
from l2r.report.paper_tables import accuracy_table
from l2r.report.patches import compare_patches, patch_figure
from l2r.report.tables import Table
from l2r.runs.folder import SEED_MARK, RunFolder
from l2r.runs.patches import read_patches
from l2r.runs.statistics import mean_interval

HOW_TO_READ_PATCHES = (
    "Color: the expert with the largest weight. Point at a patch to see all its experts."
)


def accuracy_over_seeds(runs: Sequence[RunFolder]) -> list[Table]:
    """A table of accuracy per router, mean and interval over its runs; none for language."""
    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        last = (run.read_metrics("validation") or [{}])[-1]
        if "top1" in last:
            router = str(run.read_json(run.environment).get("router", run.name))
            found.setdefault(router, []).append((100 * last["top1"], 100 * last["top5"]))
    if not found:
        return []
    results = {}
    for router, pairs in found.items():
        top1, top5 = (mean_interval(values) for values in zip(*pairs, strict=True))
        results[router] = (top1, top5, len(pairs))
    return [accuracy_table(results)]


def patch_sections(runs: Sequence[RunFolder]) -> list[Section]:
    """Patches of one run layer by layer, of several by router; empty for language models."""
    routings = {r.name: read_patches(r.patches) for r in runs if r.patches.is_file()}
    if not routings:
        return []
    if len(routings) == 1:
        figure = patch_figure(next(iter(routings.values())))
        return [Section("Patches and experts", HOW_TO_READ_PATCHES, [figure])]
    text = "The last layer with experts of every run. " + HOW_TO_READ_PATCHES
    return [Section("Patches and experts", text, [compare_patches(routings)])]


def first_seeds(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """The runs that are not repeats of another with a different seed; all, where every one is."""
    return [run for run in runs if SEED_MARK not in run.name] or list(runs)
