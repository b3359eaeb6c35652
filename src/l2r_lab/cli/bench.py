"""``l2r bench inference``: the paper's Table 10 on this machine; others are benchmarks/."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from l2r.cli.options import AsJson, Device, out_option


def bench(
    name: Annotated[Literal["inference"], typer.Argument(help="inference: the paper's Table 10.")],
    device: Device = "auto",
    seconds: Annotated[float, typer.Option(help="Time for one group of contenders.")] = 4.0,
    clock: Annotated[str, typer.Option(help="wall, or cpu for processor time.")] = "wall",
    size: Annotated[
        Literal["paper", "layer", "small", "tiny"],
        typer.Option(
            help="paper: 6.92B parameters, 4,096 tokens; layer: one such layer; small, tiny: less."
        ),
    ] = "paper",
    out: Annotated[Path | None, out_option("a folder for inference.json")] = None,
    as_json: AsJson = False,
) -> None:
    """Time prefill and decode of whole models with each router, as the paper's Table 10 does.

    Contenders take turns; medians, ranges and ratios. A wrong result gets no speed.

    Example: l2r bench inference --size small --seconds 4
    """
    from dataclasses import asdict, replace

    from l2r.files.atomic import check_place, write_json
    from l2r_lab.bench_settings import BenchSettings

    settings = BenchSettings("cpu" if device == "auto" else device, seconds, clock=clock)
    if out is not None:
        check_place(out)
    from l2r.cli.console import print_table
    from l2r.machine import pick_device
    from l2r_lab.inference import NOTE, time_inference
    from l2r_lab.report.paper_tables import inference_table
    from l2r_lab.timing import bench_table, environment

    settings = replace(settings, device=pick_device(device))
    records = time_inference(settings, size)
    if records and not as_json:
        table = inference_table(records)
        print_table(table, max_columns=len(table.columns))
    print_table(bench_table(name, NOTE, records, ranges=not as_json), as_json=as_json)
    if out is not None:
        facts = {"name": name, "note": NOTE, "settings": {**asdict(settings), "size": size}}
        written = {**facts, "environment": environment(), "records": records}
        write_json(out / f"{name}.json", written)
