"""``l2r report``: the HTML page of one run or of several."""

from pathlib import Path
from typing import Annotated

import typer

from l2r.cli.options import AsJson


def report(
    folder: Annotated[Path, typer.Argument(help="Run folder, or a folder of run folders.")],
    out: Annotated[Path | None, typer.Option(help="Page (default: FOLDER/report.html).")] = None,
    bench: Annotated[
        list[Path] | None, typer.Option(help="NAME.json of l2r bench, shown as well; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the report page of a run folder, or of all runs inside a folder.

    Prints the comparison table as well.

    Example: l2r report runs/demo --out runs/demo/report.html
    """
    from l2r.cli.console import print_table
    from l2r.report.comparison import in_paper_order, write_report
    from l2r.report.performance import bench_section, read_bench
    from l2r.runs.folder import find_runs

    speed = [bench_section(read_bench(path)) for path in bench or []]
    runs = in_paper_order(find_runs(folder))
    table, page = write_report(runs, out or folder / "report.html", more=speed)
    print_table(table, as_json=as_json)
    typer.echo(f"report: {page}", err=as_json)
