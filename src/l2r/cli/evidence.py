"""``l2r evidence``: train small models over several seeds and test the paper's claims on them."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from l2r.cli.options import AsJson, Changes

if TYPE_CHECKING:
    from l2r.experiments.cells import Cell
    from l2r.report.tables import Table
    from l2r.runs.folder import RunFolder

_RECIPE, _SEEDS, _OUT = "demo/l2r-sips", 5, Path("runs/evidence")
_PAPER_TOKENS = 10_000_000_000
_QUICK = ("training.steps=20", "evaluation.every=0", "evaluation.max_batches=4")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "evidence",
        epilog="Example: l2r evidence --seeds 5 --write docs/evidence.md",
        help="Re-test the paper's claims that a small run can carry: each holds, does not hold, or "
        "is undecided here. The same command goes on with unfinished runs.",
    )(evidence)


def evidence(
    changes: Changes = None,
    recipe: Annotated[str, typer.Option(help="Recipe whose router is varied.")] = _RECIPE,
    seeds: Annotated[int, typer.Option(help="Seeds per router.", min=2)] = _SEEDS,
    quick: Annotated[bool, typer.Option("--quick", help="20 steps, for a first look.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = _OUT,
    write: Annotated[Path | None, typer.Option(help="Also write the table as Markdown.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train every router with every seed, measure, judge."""
    from l2r.cli.console import print_table
    from l2r.experiments.cells import run_cells
    from l2r.experiments.claims import CLAIMS, VARIANTS, judge
    from l2r.runs.folder import RunFolder

    cells = plan(recipe, [*(_QUICK if quick else ()), *(changes or [])], seeds)
    for outcome in run_cells(cells, out, report=lambda line: typer.echo(line, err=True)):
        if outcome.error is not None:
            raise ValueError(f"{outcome.cell.name}: {outcome.error}")
        if outcome.signal is not None:
            typer.echo("stopped and saved; the same command goes on", err=True)
            raise typer.Exit(128 + outcome.signal)
    by_name = {cell.name: cell for cell in cells}
    numbers = {
        name: [
            measure(RunFolder(out / cell), by_name[cell])
            for cell in (f"{name}.seed-{seed}" for seed in range(seeds))
        ]
        for name in VARIANTS
    }
    table = findings_table([judge(claim, numbers) for claim in CLAIMS], seeds)
    print_table(table, as_json=as_json)
    if write is not None:
        command = command_line(changes or [], recipe, seeds, quick=quick, out=out, write=write)
        shown = "l2r_sips.seed-0"
        write_markdown(write, table, by_name[shown], RunFolder(out / shown), command)
        typer.echo(f"written: {write}", err=True)


def command_line(
    changes: list[str], recipe: str, seeds: int, *, quick: bool, out: Path, write: Path
) -> str:
    """The command that repeats a run: what differs from the defaults, and the seeds."""
    options = ["--seeds", str(seeds)]
    options += ["--recipe", recipe] if recipe != _RECIPE else []
    options += ["--quick"] if quick else []
    options += ["--out", str(out)] if out != _OUT else []
    return shlex.join(["l2r", "evidence", *changes, *options, "--write", str(write)])


def plan(recipe: str, changes: list[str], seeds: int) -> list["Cell"]:
    """A cell per router variant and seed, checked before anything is trained."""
    from l2r.experiments.cells import Cell
    from l2r.experiments.claims import VARIANTS
    from l2r.recipes.load import load_recipe, parse_recipe

    base = load_recipe(recipe, changes)
    if base.task != "language":
        raise ValueError(f"recipe must be a language recipe; got {recipe}, of task {base.task}")
    values = base.model_dump(mode="json")
    cells = []
    for seed in range(seeds):
        for name, router in VARIANTS.items():
            changed = {**values, "router": dict(router), "seed": seed}
            cells.append(
                Cell(f"{name}.seed-{seed}", {}, seed, parse_recipe(changed, source=recipe))
            )
    return cells


def measure(run: "RunFolder", cell: "Cell") -> dict[str, float]:
    """Numbers of one finished run: routing means over layers, losses over its last tenth."""
    import torch

    from l2r.diagnostics.metrics import normalised_entropy
    from l2r.experiments.measure import diagnose_run
    from l2r.runs.last_tenth import last_tenth

    if not run.diagnostics.is_file():
        run.write_json(run.diagnostics, diagnose_run(run, cell.recipe))
    summary = run.read_json(run.diagnostics)
    ends = {"train_ce": last_tenth(run, "ce"), "balance": last_tenth(run, "balance")}
    top1 = [normalised_entropy(torch.tensor(layer)) for layer in summary["usage"]["top1"]]
    return {
        **summary["mean"],
        **{name: value for name, value in ends.items() if value is not None},
        "validation_ce": run.read_metrics("validation")[-1]["ce/mean"],
        "top1_entropy": sum(top1) / len(top1),
    }


def findings_table(findings: list[Any], seeds: int) -> "Table":
    """A row per claim."""
    from l2r.report.tables import Table

    rows = []
    for finding in findings:
        claim, gap = finding.claim, finding.difference
        sign = "larger" if claim.larger else "smaller"
        rows.append(
            (
                claim.text,
                claim.where,
                f"{claim.field}: {claim.first} {sign} than {claim.second}",
                f"{finding.first:.4f}",
                f"{finding.second:.4f}",
                f"{gap.mean:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]",
                finding.verdict,
            )
        )
    columns = ("claim", "paper", "tested as", "first", "second", "difference, 95%", "verdict")
    caption = f"Means over {seeds} seeds; differences are paired by seed, intervals by Student's t."
    return Table("The paper's claims on a small model", columns, tuple(rows), caption=caption)


def write_markdown(
    path: Path, table: "Table", cell: "Cell", run: "RunFolder", command: str
) -> None:
    """The table as a page, with what was trained: the recipe of ``cell``, the length of ``run``."""
    from l2r.runs.atomic import write_text

    recipe: Any = cell.recipe
    last = run.read_metrics("train")[-1]
    source = ", ".join(recipe.data.tokens) or recipe.data.corpus
    corpus = "the embedded corpus" if source == "embedded" else source
    text = f"""# Evidence

Made by

    {command}

The claims of the paper that a small run can carry, as they came out. The model has
{recipe.model.num_hidden_layers} layers of {recipe.model.hidden_size} and
{recipe.model.num_experts} experts of which {recipe.model.num_experts_per_tok} are chosen, and saw
{last["step"]} steps of {last["tokens"] // last["step"]:,} tokens of {corpus}:
{_PAPER_TOKENS / last["tokens"]:,.0f} times fewer tokens than in the paper.
A claim that is undecided or does not hold here may still hold there.

*holds*: the whole 95% interval of the difference, paired by seed, lies on the claimed side.
*does not hold*: all of it lies on the other side. Else *undecided here*. Of
{len(table.rows)} claims without any difference, tested at 95%, {0.05 * len(table.rows):.1f}
would be decided by chance.

{table.to_markdown()}
"""
    write_text(path, text)
