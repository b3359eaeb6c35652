"""``l2r report``: the HTML page of one run or of several."""

from pathlib import Path
from typing import Annotated

import typer

from l2r.cli.options import AsJson, Open, Runs, out_option
from l2r.cli.output import echo
from l2r.errors import InputError


def report(
    folder: Runs,
    out: Annotated[Path | None, out_option("an HTML file (default: FOLDER/report.html)")] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Write it again as the run goes, until it is finished.")
    ] = False,
    interval: Annotated[float, typer.Option(help="Seconds between looks at a watched run.")] = 10,
    open_: Open = False,
    as_json: AsJson = False,
) -> None:
    """Write the report page of a run folder, or of all runs inside a folder.

    Prints the comparison table as well, and the accuracies on tasks that l2r eval has written. A
    page that is watched reloads itself in the browser.

    Example: l2r report runs/demo --out runs/demo/report.html
    """
    from l2r.files.atomic import check_file_place
    from l2r.files.folder import RunFolder, find_runs
    from l2r.files.shapes import files_of

    if not 1 <= interval < float("inf"):
        raise InputError(f"interval must be >= 1 second; got {interval:g}")
    found, path = find_runs(folder), out or folder / "report.html"
    if watch and not RunFolder(folder).is_run():
        raise InputError(f"--watch follows one run; got {folder}, which holds {len(found)}")
    check_file_place(path)
    from l2r.cli.console import print_pages, print_table
    from l2r_lab.report.comparison import in_paper_order, write_report
    from l2r_lab.report.task_accuracies import task_accuracies

    runs = in_paper_order(found)
    if watch:
        echo(f"watching {folder}; Ctrl-C ends it: {path}", err=True)
        for _ in runs[0].changes(interval):
            with files_of(runs):
                write_report(runs, path, reload=interval)
    with files_of(runs):
        table, pages = write_report(runs, path)
    print_table(table, as_json=as_json)
    for accuracies in [] if as_json else task_accuracies(runs):
        print_table(accuracies, max_columns=len(accuracies.columns), whole="the page")
    print_pages(pages, show=open_, err=as_json)
