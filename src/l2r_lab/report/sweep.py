"""The page of a sweep: tables, ablation curves, expert usage and training dynamics."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from l2r.files.diagnosis import Diagnosis, is_diagnosed, read_diagnosis
from l2r.report.page import Section, write_page
from l2r.report.routing import USAGE_TITLES, gain_bars, usage_by_layer
from l2r.report.tables import Table
from l2r_lab.report.ablation import (
    Ablation,
    Row,
    ablation_curves,
    ablation_table,
    ablations,
    all_rows_table,
    phrase,
)
from l2r_lab.report.comparison import PANELS, facts_table, unit_of
from l2r_lab.report.curves import HEALTH_PANELS, curve_sections
from l2r_lab.report.verdicts import of_arms


def write_sweep_page(rows: Sequence[Row], path: Path, *, failed: Mapping[str, str]) -> Path:
    """Write the page; ``failed`` gives the error of every cell that failed, by its name."""
    runs = [run for row in rows for run in row.runs]
    unit = unit_of(runs)
    lines = {row.label: row.runs for row in rows}
    groups = ablations(rows)
    tables = [*(ablation_table(ablation) for ablation in groups), all_rows_table(rows)]
    sections = [Section("Result", parts=tables)]
    if failed:
        table = Table("", ("cell", "error"), tuple(failed.items()))
        sections.append(Section("Failed cells", "They are in none of the tables.", [table]))
    if groups:
        text = "Training cross-entropy, mean over seeds."
        sections.append(Section("Ablations", text, [ablation_curves(groups, unit)]))
    sections += [section for ablation in groups for section in _usage(ablation)]
    text = "Mean over seeds. Downstream tasks appear where a recipe names evaluation.tasks."
    sections += curve_sections("Training dynamics", text, lines, PANELS[unit], unit)
    text = "Worst layer, mean over seeds."
    sections += curve_sections("Routing health", text, lines, HEALTH_PANELS, unit)
    sections.append(Section("Runs", parts=[facts_table(runs)]))
    summary = f"{len(rows)} choices of the grid, {len(runs)} runs, {len(failed)} failed."
    verdict = of_arms(lines)
    return write_page(path, title="l2r: sweep", summary=summary, sections=sections, verdict=verdict)


def _usage(ablation: Ablation) -> list[Section]:
    """Expert usage of every value, layer by layer; none where fewer than two were diagnosed."""
    views: dict[str, Diagnosis] = {}
    for row in ablation.rows:
        run = row.runs[0]
        if is_diagnosed(run.path):
            name = phrase(ablation.field, row.settings[ablation.field])
            views[name] = read_diagnosis(run.path)
    if len(views) < 2:
        return []
    text = (
        "First seed, on its validation data. Rows are layers, columns experts; 1 (white) is an "
        "even share."
    )
    figures = [usage_by_layer(views, kind) for kind in USAGE_TITLES]
    if all("routing_gain" in view.numbers() for view in views.values()):
        figures.append(gain_bars(views))
    return [Section(f"Expert usage: {ablation.title.lower()}", text, figures)]
