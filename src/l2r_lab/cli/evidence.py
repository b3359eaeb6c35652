"""``l2r evidence``: run a registered plan over several seeds and judge it; write a new plan."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from l2r.cli.options import AsJson, Open, out_option, tokens_option
from l2r.cli.output import say
from l2r.errors import InputError, environment_number

if TYPE_CHECKING:
    from l2r_lab.studies import Question, StudyPlan


class _RunByDefault(TyperGroup):
    """Takes ``l2r evidence PLAN`` as ``l2r evidence run PLAN``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        asks_for_help = args[:1] in (["-h"], ["--help"])
        if not asks_for_help and (not args or args[0] not in self.commands):
            args = ["run", *args]
        return super().parse_args(ctx, args)


evidence = typer.Typer(
    cls=_RunByDefault,
    help="Run a registered plan over several seeds and judge it, or write a new plan.",
    epilog="Example: l2r evidence paper --hours 3 (the same as l2r evidence run paper --hours 3)",
)


@evidence.command()
def run(
    plan: Annotated[str, typer.Argument(help="Plan of the package, or a YAML path.")] = "paper",
    seeds: Annotated[
        int | None,
        typer.Option(help="Number of seeds: at most, for now (default: the plan's).", min=1),
    ] = None,
    hours: Annotated[
        float | None, typer.Option(help="As many seeds as fit into this time.", min=0.001)
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Processes at a time: runs (default: one per core, one on a GPU).", min=1
        ),
    ] = None,
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = Path(
        "results/evidence"
    ),
    out: Annotated[Path, out_option("a folder for the runs and the page")] = Path("runs/evidence"),
    keep_runs: Annotated[
        bool, typer.Option("--keep-runs", help="Keep run folders that were measured.")
    ] = False,
    judge_only: Annotated[
        bool,
        typer.Option(
            "--judge-only",
            help="Judge the results that exist; train nothing, change nothing in their folder.",
        ),
    ] = False,
    cells_only: Annotated[
        int, typer.Option(hidden=True, help="Only run cells, at most so many.")
    ] = 0,
    open_: Open = False,
    as_json: AsJson = False,
) -> None:
    """Run a registered plan over several seeds and judge every contrast: better, worse, equivalent,
    or what its interval excludes.

    The same command goes on where it stopped; from a second terminal it helps the first.

    Example: l2r evidence paper --hours 3
    """
    from l2r.files.atomic import check_place
    from l2r_lab.studies import read_plan

    if environment_number("WORLD_SIZE", 1) > 1:
        raise InputError("this command starts processes itself; run it without torchrun")
    registered = read_plan(plan)
    stored = results / registered.name
    if judge_only and not (stored / "results.jsonl").is_file():
        raise InputError(_no_results(registered.name, stored))
    for place in (out, *([] if judge_only else [results])):
        check_place(place)

    from l2r.cli.console import print_pages, print_table
    from l2r_lab.report.evidence import write_study
    from l2r_lab.report.evidence_tables import main_table, terminal_table
    from l2r_lab.studies import (
        Budget,
        StudyPlaces,
        StudyStoppedError,
        results_of,
        run_plan,
        run_share,
        study_of,
    )

    most = min(seeds or registered.plan.seeds.most, registered.plan.seeds.most)
    places = StudyPlaces(stored, out / registered.name, keep_runs)
    cells = registered.plan.cells(most)
    if cells_only:
        if os.nice(0) == 0:  # the user's own niceness stays
            os.nice(10)
        failed, signal = run_share(registered, cells, places, limit=cells_only, report=say)
        raise typer.Exit(128 + signal if signal else int(failed > 0))
    found = results_of(registered, cells, places)  # of another recipe: said before hours of work
    if judge_only and not found:
        raise InputError(_no_results(registered.name, places.results))
    ended = places.ended()
    if ended and not judge_only:
        raise InputError(f"{registered.name} was ended: {ended} --judge-only judges what there is")
    whole = len({result.seed for result in found}) >= registered.plan.seeds.least
    if registered.closed and whole and not judge_only:
        raise InputError(
            f"{registered.name} is closed as it is: its number of seeds was not fixed. "
            "--judge-only judges what there is; another --results runs its seeds again"
        )
    if not judge_only:
        try:
            found = run_plan(registered, plan, places, Budget(most, hours, processes), say)
        except StudyStoppedError as end:
            resumes = "stopped; the same command goes on from what was saved"
            say("runs failed; the same command tries them again" if end.signal is None else resumes)
            raise typer.Exit(1 if end.signal is None else 128 + end.signal) from None
    study = study_of(registered, found, ended)
    print_table(main_table(study) if as_json else terminal_table(study), as_json=as_json)
    pages = out / registered.name
    page, text = write_study(study, pages, pages if judge_only else places.results)
    say(registered.state)
    print_pages([page, text], show=open_, err=True)


def _no_results(name: str, folder: Path) -> str:
    return (
        f"--judge-only needs results of {name}; got none in {folder.resolve()} (a clone of the "
        "project has them; --results names the folder of all studies)"
    )


@evidence.command()
def new(
    file: Annotated[Path, typer.Argument(help="New plan's file, NAME.yaml.")],
    arm: Annotated[
        list[str],
        typer.Option(
            help="NAME or NAME:KEY=VALUE,KEY=VALUE, at least twice; the first is what the others "
            "are compared with."
        ),
    ],
    recipe: Annotated[str, typer.Option(help="Recipe that all arms share.")] = "demo/linear",
    metric: Annotated[str, typer.Option(help="Measure that is compared.")] = "validation_ce",
    better: Annotated[
        Literal["smaller", "larger"], typer.Option(help="Better values of the metric.")
    ] = "smaller",
    margin: Annotated[
        float, typer.Option(help="Smallest difference that matters (nats, for losses).")
    ] = 0.02,
    sd: Annotated[
        float, typer.Option(help="Expected deviation of the paired differences over seeds.")
    ] = 0.018,
    tokens: Annotated[str | None, tokens_option("of a run (default: the recipe's)")] = None,
    first_seed: Annotated[
        int,
        typer.Option(help="First seed: none that an earlier study has seen.", min=0, max=2**62 - 1),
    ] = 0,
    results: Annotated[Path, typer.Option(help="Folder of the results.")] = Path(
        "results/evidence"
    ),
    as_json: AsJson = False,
) -> None:
    """Write a plan of your own, with the seeds that its margin needs and the hours they take.

    Example: l2r evidence new rank.yaml --arm r2:router.rank=2 --arm r8:router.rank=8 --recipe
    demo/l2r-sips --tokens 1024000
    """
    from l2r.cli.console import print_table
    from l2r.files.wording import parse_tokens
    from l2r_lab.studies import Question, seconds_per_run, write_plan

    count = None if tokens is None else parse_tokens(tokens)
    for name, value in (("margin", margin), ("sd", sd)):
        if not 0 < value < float("inf"):
            raise InputError(f"{name} must be > 0 and finite; got {value:g}")
    named = [word.partition(":")[::2] for word in arm]
    arms = {name: [change for change in changes.split(",") if change] for name, changes in named}
    if len(arms) < len(arm):
        raise InputError(f"--arm must have different names; got {', '.join(arm)}")
    question = Question(
        file.stem, recipe, arms, metric, better, margin, sd, count, first_seed=first_seed
    )
    written = write_plan(file, question)
    print_table(_power_table(question, written, seconds_per_run(written, results)), as_json=as_json)
    say(f"written: {file}; commit it, then: l2r evidence {file}")


def _power_table(question: "Question", plan: "StudyPlan", seconds: float | None) -> Any:
    """Difference found and hours by number of seeds, around what the plan has."""
    from l2r.report.tables import Table
    from l2r_lab.studies import PLANNED_POWER

    needed = plan.seeds.least
    cost = None if seconds is None else seconds * len(plan.arms) / 3600
    rows = tuple(
        (seeds, question.detectable(seeds), None if cost is None else round(seeds * cost, 1))
        for seeds in sorted({3, 5, 10, 20, needed})
    )
    hours = "" if cost is None else f", {needed * cost:.1f} hours of one core"
    return Table(
        "Power",
        ("seeds", f"difference found with power {PLANNED_POWER:g}", "hours of one core"),
        rows,
        verdict=f"{needed} seeds find a difference of {question.margin:g}{hours}.",
        caption="Hours: from stored runs of this model on this processor; empty without any.",
    )
