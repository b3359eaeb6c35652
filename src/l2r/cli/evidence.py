"""``l2r evidence``: train small models over several seeds and test the paper's claims on them."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from l2r.cli.experiment import Launch, end, run_all, say
from l2r.cli.options import AsJson, Changes

_RECIPE, _SEEDS, _OUT = "demo/l2r-sips", 5, Path("runs/evidence")
_QUICK = ("training.steps=20", "evaluation.every=0", "evaluation.max_batches=4")


def evidence(
    changes: Changes = None,
    recipe: Annotated[str, typer.Option(help="Recipe whose router is varied.")] = _RECIPE,
    seeds: Annotated[int, typer.Option(help="Seeds per router.", min=2)] = _SEEDS,
    quick: Annotated[bool, typer.Option("--quick", help="20 steps, for a first look.")] = False,
    out: Annotated[Path, typer.Option(help="Folder of the runs.")] = _OUT,
    write: Annotated[Path | None, typer.Option(help="Also write the table as Markdown.")] = None,
    launch: Launch = None,
    as_json: AsJson = False,
) -> None:
    """Re-test the paper's claims that a small run can carry: each holds, does not hold, or is
    undecided here. The same command resumes unfinished runs.

    Trains every router with every seed, measures, judges.

    Example: l2r evidence --seeds 5 --write docs/evidence.md
    """
    from l2r.cli.console import print_table
    from l2r.experiments.cells import claim_cells
    from l2r.experiments.claims import CLAIMS, judge
    from l2r.experiments.measure import measure
    from l2r.report.evidence import claims_table, write_claims

    cells = claim_cells(recipe, [*(_QUICK if quick else ()), *(changes or [])], seeds)
    finished, failed = run_all(cells, out, launch=launch)
    end(failed, cells)
    runs = {outcome.cell.name: outcome.run for outcome in finished}
    numbers: dict[str, list[dict[str, float]]] = {}
    for cell in cells:
        numbers.setdefault(cell.arm, []).append(measure(runs[cell.name], cell.recipe))
    table = claims_table([judge(claim, numbers).row() for claim in CLAIMS], seeds)
    print_table(table, as_json=as_json)
    if write is not None:
        command = command_line(changes or [], recipe, seeds, quick=quick, out=out, write=write)
        shown = next(outcome.run for outcome in finished if outcome.cell.arm == "l2r_sips")
        write_claims(write, table, shown, command)
        say(f"written: {write}")


def command_line(
    changes: list[str], recipe: str, seeds: int, *, quick: bool, out: Path, write: Path
) -> str:
    """The command that repeats a run: what differs from the defaults, and the seeds."""
    options = ["--seeds", str(seeds)]
    options += ["--recipe", recipe] if recipe != _RECIPE else []
    options += ["--quick"] if quick else []
    options += ["--out", str(out)] if out != _OUT else []
    return shlex.join(["l2r", "evidence", *changes, *options, "--write", str(write)])
