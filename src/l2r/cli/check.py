"""``l2r check``: whether a checkpoint's routers, losses and masks are as they should be."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import typer
from rich.console import Console

from l2r.cli.options import (
    AsJson,
    Checkpoint,
    Data,
    Device,
    DeviceMap,
    Dtype,
    Length,
    Revision,
    Rows,
    Text,
    TrustRemoteCode,
    check_one_source,
    out_option,
    read_text,
)
from l2r.cli.output import echo, say
from l2r.errors import InputError
from l2r.files.atomic import plain_json
from l2r.files.wording import named_path


def check(
    checkpoint: Checkpoint,
    text: Text = None,
    data: Data = None,
    out: Annotated[
        Path | None, out_option("a folder for the page and the findings (default: none)")
    ] = None,
    instances: Rows = 8,
    length: Length = 128,
    balance: Annotated[
        float | None,
        typer.Option(help="Weight of a balance loss that training adds (default: the run's own)."),
    ] = None,
    z: Annotated[
        float | None,
        typer.Option("--z", help="Weight of a z-loss that training adds (default: the run's own)."),
    ] = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Check the routers of a MoE checkpoint: one line each, ok, warning or fault, and the remedy.

    Auxiliary losses, padding, dtypes, dead and overloaded experts, selection rules, gradients,
    quantized and untrained routers. Exit code 1 for a fault. Reads text in the checkpoint's own
    tokens, or token files. With --out also a page.

    Example: l2r check allenai/OLMoE-1B-7B-0924 --json
    """
    from l2r.files.atomic import check_place
    from l2r.hf.checkpoints import (
        Placement,
        check_is_language_model,
        check_reads,
        local_checkpoint,
    )

    placement = Placement(dtype, device, device_map, say)
    if instances < 2:
        raise InputError(f"instances must be >= 2; got {instances}")
    check_one_source(text, data)
    if out is not None:
        check_place(out)
    folder = local_checkpoint(checkpoint, revision=revision, code=trust_remote_code)
    check_reads(folder, data)
    if text is not None:
        check_is_language_model(folder, checkpoint)
        text = read_text(text)
    from l2r.analysis import announce, open_subject, reads_of_check, rows_read
    from l2r.analysis.diagnostics.checks import check_model
    from l2r.cli.console import print_pages, progress_bars
    from l2r.files.atomic import make_folder, write_json
    from l2r.report.check import verdict, write_check

    code: Any = {"trust_remote_code": trust_remote_code}
    reads = reads_of_check(*rows_read(folder, instances, length, text, **code))
    announce([(folder, reads)], placement, say, **code)
    weights = _recipe_losses(folder)
    weights.update({k: v for k, v in (("balance", balance), ("z", z)) if v is not None})
    subject = open_subject(
        folder,
        data,
        text=text,
        instances=instances,
        length=length,
        report=say,
        placement=placement,
        trust_remote_code=trust_remote_code,
        held_out=False,
    )
    rows = next(subject.batches(instances, subject.device))
    batch = {k: v for k, v in rows.items() if k not in ("domain", "targets")}
    with progress_bars() as bars:
        findings = check_model(subject.model, batch, **weights, report=partial(bars, "checks"))
    if as_json:
        echo(plain_json([asdict(finding) for finding in findings]))
    else:
        echo(verdict(checkpoint, findings))
        console = Console()
        for finding in findings:
            line = str(finding)  # one line each, which a terminal would break inside of words
            width = console.width if console.is_terminal else len(line)
            echo(fill(line, width, subsequent_indent=" " * 8))
    if out is not None:
        make_folder(out)
        write_json(out / "check.json", [asdict(finding) for finding in findings])
        page = write_check(out / "index.html", named_path(checkpoint).name, findings)
        print_pages([page], err=as_json)
    if any(finding.status == "fault" for finding in findings):
        raise typer.Exit(1)


def _recipe_losses(folder: Path) -> dict[str, float]:
    """Weights of the router losses in the recipe of a run folder; none of another folder."""
    from l2r.files.folder import RunFolder

    run = RunFolder(folder)
    losses = run.read_recipe().get("losses") if run.is_run() else None
    if not isinstance(losses, dict):
        return {}
    found = {name: losses[name] for name in ("balance", "z") if name in losses}
    for name, value in found.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            raise InputError(
                f"losses.{name} in {run.recipe} must be a number; got {value!r}"
            ) from None
    return found
