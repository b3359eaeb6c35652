"""``l2r bench``: speed and memory of routers, experts, steps and inference on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from l2r.cli.options import AsJson, Device, Open, must_exist, out_option
from l2r.cli.output import echo


def bench(
    name: Annotated[str, typer.Argument(help="router|memory|scaling|moe|step|inference|routes")],
    device: Device = "auto",
    seconds: Annotated[float, typer.Option(help="Time for one group of contenders.")] = 4.0,
    clock: Annotated[str, typer.Option(help="wall, or cpu for processor time.")] = "wall",
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Also time torch.compile of the plain code.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Small shapes, to try it.")] = False,
    out: Annotated[Path | None, out_option("a folder for NAME.json and NAME.html")] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="What to compare with: NAME.json of an earlier run; exit code 1 where one became "
            "slower.",
            callback=must_exist,
        ),
    ] = None,
    open_: Open = False,
    as_json: AsJson = False,
) -> None:
    """Time what this machine does: router, memory, scaling, moe, step, inference or routes.

    Contenders take turns; medians, ranges and ratios. A wrong result gets no speed. --against tests
    the ratios of all turns against those of an earlier run.

    Example: l2r bench router --seconds 4 --json
    """
    from dataclasses import replace
    from functools import partial

    from l2r.cost.benchmarks import BenchSettings, check_bench
    from l2r.runs.atomic import check_place

    check_bench(name)
    named = "cpu" if device == "auto" else device
    settings = BenchSettings(named, seconds, quick, compiled, clock)
    if out is not None:
        check_place(out)
    from l2r.cli.console import print_pages, print_table, progress_bars
    from l2r.cost.benchmarks import REGRESSION_ALPHA, bench_changes, run_bench, save_bench
    from l2r.machine import pick_device
    from l2r.report.performance import bench_table, read_bench, write_bench_page

    baseline = None if against is None else read_bench(against)
    settings = replace(settings, device=pick_device(device))
    with progress_bars() as bars:
        watched = replace(settings, watch=partial(bars, name))
        result = run_bench(name, watched).as_dict()
    print_table(bench_table(result, ranges=not as_json), as_json=as_json)
    if out is not None:
        save_bench(result, out)
        page = write_bench_page(result, out / f"{name}.html")
        print_pages([page], show=open_, err=as_json)
    if baseline is not None:
        changes = bench_changes(baseline, result)
        slower = [change for change in changes if change.regressed]
        for change in slower:
            echo(f"slower: {change}", err=as_json)
        echo(f"{len(slower)} of {len(changes)} ratios became slower", err=as_json)
        if any(change.least_p >= REGRESSION_ALPHA for change in changes):
            echo("too few turns to detect a regression: give more --seconds", err=True)
        if slower:
            raise typer.Exit(1)
