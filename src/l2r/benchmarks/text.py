"""A benchmark as a plain text table, for logs."""

from typing import Any

from l2r.benchmarks.results import Bench


def text_table(bench: Bench) -> str:
    """Title, environment, note and aligned columns."""
    place = ", ".join(f"{key} {value}" for key, value in bench.environment.items() if value)
    lines = [f"# {bench.name}: {place}", *([bench.note] if bench.note else [])]
    if not bench.records:
        return "\n".join(lines)
    columns = list(bench.records[0])
    rows = [columns, *([_show(record[c]) for c in columns] for record in bench.records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    lines += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _show(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
