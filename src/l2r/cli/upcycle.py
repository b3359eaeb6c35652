"""``l2r upcycle``: swap the routers of a checkpoint and fit the new ones to the old."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from l2r.models.upcycle import UpcycleReport
    from l2r.report.tables import Table


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "upcycle",
        epilog="Example: l2r upcycle my-olmoe --router l2r_sips --rank 8 --out my-l2r",
        help="Replace the routers of a checkpoint by ones fitted to the old ones' decisions.",
    )(upcycle)


def upcycle(
    checkpoint: Annotated[Path, typer.Argument(help="Folder in Hugging Face format, or a run.")],
    router: Annotated[str, typer.Option(help="Router to put in.")] = "l2r_sips",
    rank: Annotated[int | None, typer.Option(help="Rank r of the routing query.")] = None,
    heads: Annotated[int | None, typer.Option(help="Anchors H per expert.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="Further name=value.")] = None,
    layers: Annotated[str | None, typer.Option(help="Indices like 0,3,5 [all].")] = None,
    text: Annotated[Path | None, typer.Option(help="Folder of *.txt [embedded text].")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to fit on.")] = 200_000,
    held_out: Annotated[int, typer.Option(help="Tokens to measure on.")] = 50_000,
    sequence_length: Annotated[int, typer.Option(help="Tokens per row.")] = 256,
    batch_size: Annotated[int, typer.Option(help="Rows per batch.")] = 8,
    updates: Annotated[int, typer.Option(help="Fit updates per batch; 0 copies nothing.")] = 4,
    lr: Annotated[float, typer.Option(help="Learning rate of the fit.")] = 0.01,
    train_steps: Annotated[int, typer.Option(help="Steps of joint training afterwards.")] = 0,
    train_lr: Annotated[float, typer.Option(help="Learning rate of joint training.")] = 1e-4,
    out: Annotated[Path | None, typer.Option(help="New folder for the checkpoint.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print records as JSON.")] = False,
) -> None:
    """Print agreement per layer and perplexity per stage; write the checkpoint to --out."""
    from l2r.cli.console import print_table
    from l2r.cli.router_options import layer_list, router_config
    from l2r.data.sample_text import sample_batches
    from l2r.models import load_causal_lm
    from l2r.models import upcycle as upcycling
    from l2r.models.pretrained import check_new_folder, save_model

    config = router_config(router, rank, heads, option or [])
    options = upcycling.FitOptions(
        updates=updates, lr=lr, joint_steps=train_steps, joint_lr=train_lr
    )
    if out is not None:
        check_new_folder(out)
    model, tokenizer = load_causal_lm(checkpoint, dtype="auto")
    if tokenizer is None:
        raise ValueError(f"checkpoint must hold a tokenizer to read text with; got {checkpoint}")
    fit_batches, other = sample_batches(
        tokenizer,
        folder=text,
        tokens=tokens,
        held_out_tokens=held_out,
        sequence_length=sequence_length,
        batch_size=batch_size,
    )
    with stage_bars() as report:
        result = upcycling.upcycle(
            model,
            config,
            fit_batches,
            other,
            options=options,
            layers=layer_list(layers),
            report=report,
        )
    if as_json:
        typer.echo(json.dumps(asdict(result), indent=2))
    else:
        for table in upcycle_tables(result, config.kind):
            print_table(table)
    if out is not None:
        save_model(model, out, tokenizer=tokenizer)
        typer.echo(f"saved: {out}; load it with l2r.load_pretrained({str(out)!r})", err=as_json)


@contextmanager
def stage_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar per stage on standard error."""
    from rich.console import Console
    from rich.progress import Progress, TaskID

    tasks: dict[str, TaskID] = {}
    with Progress(console=Console(stderr=True)) as progress:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done)

        yield report


def upcycle_tables(result: "UpcycleReport", kind: str) -> "tuple[Table, Table]":
    """Agreement and divergence per layer; perplexity per stage."""
    from l2r.report.tables import Table

    columns = ("layer", "agreement drawn", "agreement fitted", "KL drawn", "KL fitted")
    rows = [
        (f.layer, f.agreement_before, f.agreement, f.divergence_before, f.divergence)
        for f in result.layers
    ]
    fit = Table(
        f"{kind}: agreement with the old routers",
        columns,
        tuple(rows),
        caption="Share of a token's experts that old and new router both choose; held-out text.",
    )
    stages = tuple(result.perplexity.items())
    return fit, Table("Perplexity on held-out text", ("stage", "perplexity"), stages, digits=3)
