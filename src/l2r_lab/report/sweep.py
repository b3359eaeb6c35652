"""The page of a sweep: the loss against the swept setting; tables, curves and usage folded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from l2r.files.diagnosis import Diagnosis, is_diagnosed, read_diagnosis
from l2r.report.page import Section, write_page
from l2r.report.routing import USAGE_TITLES, gain_bars, usage_by_layer
from l2r.report.tables import Table
from l2r.report.verdicts import Verdict
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
from l2r_lab.report.swept_settings import swept_figure, swept_table
from l2r_lab.report.verdicts import judged_values, of_arms


def write_sweep_page(rows: Sequence[Row], path: Path, *, failed: Mapping[str, str]) -> Path:
    """Write the page; ``failed`` gives the error of every cell that failed, by its name."""
    runs = [run for row in rows for run in row.runs]
    lines = {row.label: row.runs for row in rows}
    judged = judged_values(lines)
    lead, sections = list[Any](), list[Section]()
    if not isinstance(judged, Verdict):
        lead = swept_figure(rows, judged)
        sections.append(Section("Result", parts=[swept_table(rows, judged)]))
    if failed:
        table = Table("", ("cell", "error"), tuple(failed.items()))
        sections.append(Section("Failed cells", "They are in none of the tables.", [table]))
    sections += [replace(section, folded=True) for section in _details(rows)]
    return write_page(
        path,
        title="l2r: sweep",
        summary=f"{len(rows)} choices of the grid, {len(runs)} runs, {len(failed)} failed.",
        sections=sections,
        verdict=of_arms(lines),
        lead=lead,
    )


def _details(rows: Sequence[Row]) -> list[Section]:
    """Return what does not help to choose: every number, curves, expert usage, runs.

    Tables and curves of an ablation stand there where it is not the whole sweep.
    """
    runs = [run for row in rows for run in row.runs]
    unit, groups = unit_of(runs), ablations(rows)
    lines = {row.label: row.runs for row in rows}
    parts = [ablation for ablation in groups if len(ablation.rows) < len(rows)]
    panels = PANELS[unit]
    sections = [Section("All numbers", parts=[replace(all_rows_table(rows), title="")])]
    if parts:
        tables = [ablation_table(ablation) for ablation in parts]
        sections.append(Section("Ablations in the layout of the paper", parts=tables))
        text = "Training cross-entropy, mean over seeds."
        sections.append(Section("Training of each ablation", text, [ablation_curves(parts, unit)]))
        panels = panels[1:]  # the training cross-entropy stands there
    text = "Mean over seeds."
    sections += curve_sections("Training dynamics", text, lines, panels, unit)
    text = "Worst layer, mean over seeds."
    sections += curve_sections("Routing health", text, lines, HEALTH_PANELS, unit)
    sections += [section for ablation in groups for section in _usage(ablation)]
    return [*sections, Section("Runs", parts=[facts_table(runs)])]


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
