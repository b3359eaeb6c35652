"""``l2r data``: from the OLMoE mixture, or from text of your own, to token files."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from l2r.cli.options import AsJson, at_least, data_option, must_exist, out_option, tokens_option
from l2r.cli.output import echo
from l2r.errors import InputError
from l2r.files.wording import parse_tokens
from l2r.report.tables import Table

if TYPE_CHECKING:
    from l2r.text import Manifest
    from l2r_lab.training.data import PrepareProgress, ShardPlan

data = typer.Typer(
    help="Plan a subset of the OLMoE mixture; turn it, or your own text, into token files.",
    epilog="Example: l2r data plan --tokens 200B",
)


@data.command()
def plan(
    tokens: Annotated[str, tokens_option("of the subset")] = "200B",
    seed: Annotated[int, typer.Option(help="Seed: of the draw; 2025 in the paper.")] = 2025,
    listing: Annotated[
        str | None,
        typer.Option(help="Where shard names come from: 'hub', or a folder with all shards."),
    ] = None,
    out: Annotated[Path | None, out_option("a JSON file for the plan")] = None,
    as_json: AsJson = False,
) -> None:
    """Distribution-matched subset of allenai/OLMoE-mix-0924 in whole shards (paper, Table 11).

    Example: l2r data plan --tokens 200B --listing hub --out plan.json
    """
    from l2r.cli.console import print_table
    from l2r.files.atomic import check_file_place
    from l2r_lab.training.data import (
        name_shards,
        plan_subset,
        shard_source,
        write_plan,
    )

    if out is not None:
        check_file_place(out)
    chosen = plan_subset(parse_tokens(tokens), seed=seed)
    if listing is not None:
        shards = shard_source(listing, chosen)
        chosen = name_shards(chosen, shards.files, revision=shards.origin.get("revision"))
    print_table(plan_table(chosen), as_json=as_json)
    if out is not None:
        write_plan(out, chosen)
        echo(f"wrote {out}", err=True)


def _hub_or_path(param: typer.CallbackParam, source: str) -> str:
    return source if source == "hub" else str(must_exist(param, source))


@data.command()
def prepare(
    *,
    out: Annotated[Path, out_option("a folder for the token files")],
    plan: Annotated[
        Path | None, typer.Option(help="Plan from l2r data plan --out.", callback=must_exist)
    ] = None,
    data: Annotated[
        str,
        data_option(
            "a folder of text, *.txt, *.jsonl, *.json.gz, *.parquet, or hub for the shards of "
            "--plan",
            _hub_or_path,
        ),
    ] = "hub",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json or its folder; OLMoE's by default.", callback=must_exist),
    ] = None,
    hold_out: Annotated[
        float,
        typer.Option(
            help="Share of the documents held out, e.g. 0.001: writes train/, validation/."
        ),
    ] = 0.0,
    share: Annotated[
        float, typer.Option(help="Share of the other documents kept for training.")
    ] = 1.0,
    processes: Annotated[
        int, typer.Option(help="Processes at a time.", callback=at_least(1))
    ] = os.cpu_count() or 1,
    on_bad_shard: Annotated[
        Literal["refuse", "skip"],
        typer.Option(help="What to do with a corrupt shard: refuse or skip."),
    ] = "refuse",
    as_json: AsJson = False,
) -> None:
    """Tokenize shards into memory-mapped token files; run again to resume after a kill.

    Example: l2r data prepare --plan plan.json --hold-out 0.001 --share 0.06 --out
    data/olmoe-mix-10B

    Example: l2r data prepare --data my-text --tokenizer my-tokenizer --out tokens
    """
    from l2r.files.atomic import check_place
    from l2r.text import Split
    from l2r_lab.training.data import read_plan, shard_source

    split = Split(hold_out=hold_out, share=share)
    check_place(out)
    chosen = read_plan(plan) if plan is not None else None
    shards = shard_source(data, chosen)
    from l2r.cli.console import print_table
    from l2r.text import TRAIN_PART
    from l2r_lab.training.data import prepare_tokens, shard_tasks

    tasks = shard_tasks(shards.files, shards.prefix, plan=chosen)
    with _progress_bar() as watch:
        manifests = prepare_tokens(
            tasks,
            out,
            tokenizer=tokenizer,
            split=split,
            workers=processes,
            on_bad_shard=on_bad_shard,
            source=shards.origin,
            on_progress=watch,
        )
    for reason in manifests[TRAIN_PART].source["skipped"].values():
        echo(f"skipped: {reason}", err=True)
    print_table(_token_table(manifests), as_json=as_json)
    for part, folder in split.folders(out).items():
        manifest = manifests[part]
        echo(
            f"{folder}: {manifest.tokens:,} tokens in {len(manifest.files)} files, "
            f"{manifest.tokenizer.dtype.name}, tokenizer {manifest.tokenizer.name}",
            err=as_json,
        )


@data.command()
def toy(
    tokens: Annotated[str, tokens_option("of the plan whose shards hold text")] = "10B",
    out: Annotated[Path, out_option("a folder for mix, c4 and imagenet")] = Path(),
) -> None:
    """Write small stand-ins for the mixture, C4 and ImageNet, to rehearse the paper's commands.

    Example: l2r data toy --out rehearsal
    """
    from l2r.files.atomic import check_place
    from l2r_lab.training.data import plan_subset, write_toy_data

    check_place(out)
    for place in write_toy_data(out, plan_subset(parse_tokens(tokens))):
        echo(f"wrote {place}", err=True)


@data.command()
def tokenizer(
    *,
    data: Annotated[Path, data_option("a folder of text, *.txt, *.jsonl, *.parquet", must_exist)],
    out: Annotated[Path, out_option("a new folder for the tokenizer")],
    vocab_size: Annotated[
        int, typer.Option(help="Tokens, at least 300.", callback=at_least(300))
    ] = 4096,
) -> None:
    """Train a byte-level BPE on your text, on what is not held out.

    Example: l2r data tokenizer --data my-text --out my-tokenizer --vocab-size 8000
    """
    from l2r.files.atomic import check_place, new_folder
    from l2r.text import CorpusOptions, split_corpus, write_new_tokenizer

    if out.exists():
        raise InputError(f"out must be a new folder; got {out}")
    check_place(out)
    train, _ = split_corpus(CorpusOptions(str(data), vocab_size))
    texts = (text for domain in train.values() for text in domain)
    with new_folder(out) as part:
        _, identity = write_new_tokenizer(part, texts, vocab_size)
    echo(f"{out}: {identity.vocab_size:,} tokens; use it with l2r data prepare --tokenizer {out}")


def _token_table(manifests: "dict[str, Manifest]") -> Table:
    """Tokens and share of every domain in every part: the mixture that was really made."""
    columns = ["Domain"]
    counts = []
    for part, manifest in manifests.items():
        columns += [f"{part} documents", f"{part} tokens", f"{part} share (%)"]
        counts.append((manifest.by_domain(), manifest.tokens))
    rows = [
        (name, *chain.from_iterable((*d[name], 100 * d[name][1] / total) for d, total in counts))
        for name in counts[0][0]
    ]
    few = tuple(column for column in columns if not column.endswith("documents"))
    return Table("Tokens", tuple(columns), tuple(rows), digits=2, few=few)


def plan_table(plan: "ShardPlan") -> Table:
    """Return a plan as the paper's Table 11: shards and estimated tokens by domain."""
    rows = [
        (d.name, d.total_shards, len(d.shards), d.tokens / 1e9, 100 * d.tokens / plan.tokens)
        for d in plan.domains
    ]
    total = (
        "Total",
        sum(row[1] for row in rows),
        sum(row[2] for row in rows),
        plan.tokens / 1e9,
        100.0,
    )
    return Table(
        title=f"Subset of {plan.repository}",
        columns=(
            "Domain",
            "Total shards",
            "Selected shards",
            "Approx. tokens (B)",
            "Token share (%)",
        ),
        rows=(*rows, total),
        caption=f"Target {plan.target_tokens / 1e9:g}B tokens, seed {plan.seed}; tokens are "
        f"estimated from the mean shard of a domain.",
        digits=2,
    )


@contextmanager
def _progress_bar() -> Iterator["Callable[[PrepareProgress], None]"]:
    """Make a bar for the totals of ``prepare``; speed counts this run's tokens only."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    told = TextColumn("{task.percentage:5.1f}%  {task.fields[tokens]} tokens  {task.fields[speed]}")
    columns = (TextColumn("{task.description}"), BarColumn(), told, TimeRemainingColumn())
    start: list[tuple[float, int]] = []
    with Bars(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("", total=None, tokens="", speed="")

        def show(now: "PrepareProgress") -> None:
            del start[1:]  # all but the first
            start.append((time.monotonic(), now.tokens))
            seconds = max(start[-1][0] - start[0][0], 1e-3)
            bars.update(
                task,
                total=now.bytes_total,
                completed=now.bytes_read,
                description=f"{now.shards}/{now.shards_total} shards",
                tokens=f"{now.tokens:,}",
                speed=f"{(now.tokens - start[0][1]) / seconds:,.0f} tokens/s",
            )

        yield show
