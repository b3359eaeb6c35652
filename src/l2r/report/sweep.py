"""The page of a sweep: tables, ablation curves and training dynamics."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from l2r.report.ablation import (
    Row,
    ablation_curves,
    ablation_table,
    ablations,
    all_rows_table,
)
from l2r.report.comparison import PANELS, facts_table, unit_of
from l2r.report.curves import HEALTH_PANELS, curves
from l2r.report.page import Section, write_page
from l2r.report.tables import Table


def write_sweep_page(rows: Sequence[Row], path: Path, *, failed: Mapping[str, str]) -> Path:
    """Write the page; ``failed`` gives the error of every cell that failed, by its name.

    Raises ValueError when there is no row.
    """
    if not rows:
        raise ValueError("a sweep page needs at least one finished cell; got none")
    runs = [run for row in rows for run in row.runs]
    unit = unit_of(runs)
    lines = {row.label: row.runs for row in rows}
    found = ablations(rows)
    tables = [*(ablation_table(ablation) for ablation in found), all_rows_table(rows)]
    sections = [Section("Result", parts=tables)]
    if failed:
        table = Table("", ("cell", "error"), tuple(failed.items()))
        sections.append(Section("Failed cells", "They are in none of the tables.", [table]))
    if found:
        text = "Training cross-entropy, mean over seeds."
        sections.append(Section("Ablations", text, [ablation_curves(found, unit)]))
    sections.append(
        Section(
            "Training dynamics",
            "Mean over seeds. Downstream tasks appear where a recipe names evaluation.tasks.",
            [curves(lines, PANELS[unit], unit)],
        )
    )
    text = "Worst layer, mean over seeds."
    sections.append(Section("Routing health", text, [curves(lines, HEALTH_PANELS, unit)]))
    facts = {run.name: run.read_json(run.environment) for run in runs}
    sections.append(Section("Runs", parts=[facts_table(facts)]))
    summary = f"{len(rows)} choices of the grid, {len(runs)} runs, {len(failed)} failed."
    return write_page(path, title="l2r: sweep", summary=summary, sections=sections)
