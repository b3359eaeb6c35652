"""``l2r report``: the HTML page of one run or of several."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "report",
        epilog="Example: l2r report runs/demo --out runs/demo/report.html",
        help="Write the report page of a run folder, or of all runs inside a folder.",
    )(report)


def report(
    folder: Annotated[Path, typer.Argument(help="Run folder, or a folder of run folders.")],
    out: Annotated[Path | None, typer.Option(help="Page [default: FOLDER/report.html].")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Print the comparison table and write the page."""
    from l2r.cli.console import print_table
    from l2r.data.run_folder import find_runs
    from l2r.report.comparison import comparison_table, write_report

    runs = find_runs(folder)
    print_table(comparison_table(runs), as_json=json)
    page = write_report(runs, out or folder / "report.html")
    typer.echo(f"report: {page}", err=json)
