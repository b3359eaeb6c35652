"""Joins runs of image classifiers with the figures that only they have."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from l2r.data.run_folder import RunFolder
from l2r.report.page import Section
from l2r.report.tables import Table

if TYPE_CHECKING:
    from l2r.cli.image_input import ImageInput

SEED_MARK = ".seed-"  # in the names of runs that repeat another with a different seed
_HOW_TO_READ = (
    "Colour: the expert with the largest weight. Point at a patch to see all its experts."
)


def accuracy_over_seeds(runs: Sequence[RunFolder]) -> list[Table]:
    """A table of accuracy per router, mean and interval over its runs; none for language."""
    from l2r.diagnostics.intervals import mean_interval
    from l2r.report.paper_tables import accuracy_table

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
        first, five = ((i.mean, i.high - i.mean) for i in (top1, top5))
        results[router] = (first, five, len(pairs))
    return [accuracy_table(results)]


def patch_sections(runs: Sequence[RunFolder]) -> list[Section]:
    """Patches of one run layer by layer, of several by router; empty for language models."""
    from l2r.report.patches import compare_patches, patch_figure, read_patch_routing

    routings = {r.name: read_patch_routing(r.patches) for r in runs if r.patches.is_file()}
    if not routings:
        return []
    if len(routings) == 1:
        figure = patch_figure(next(iter(routings.values())))
        return [Section("Patches and experts", _HOW_TO_READ, [figure])]
    text = "The last layer with experts of every run. " + _HOW_TO_READ
    return [Section("Patches and experts", text, [compare_patches(routings)])]


def write_patch_page(folder: Path, model: Any, images: "ImageInput") -> Path:
    """patches.npz and patches.html of some validation images in ``folder``."""
    from l2r.cli.image_input import save_patches
    from l2r.report.page import write_page
    from l2r.report.patches import patch_figure, read_patch_routing

    routing = read_patch_routing(save_patches(folder / "patches.npz", model, images, count=12))
    section = Section("Patches and experts", _HOW_TO_READ, [patch_figure(routing, images=12)])
    return write_page(
        folder / "patches.html",
        title=folder.name,
        summary=str(type(model).__name__),
        sections=[section],
    )


def first_seeds(runs: Sequence[RunFolder]) -> list[RunFolder]:
    """The runs that are not repeats of another with a different seed."""
    return [run for run in runs if SEED_MARK not in run.name]
