"""``l2r compare``: train several recipes alike, look at their routers, write one report."""

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from l2r.cli.options import AsJson, Changes, Seeds


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "compare",
        epilog="Example: l2r compare demo training.steps=100 --routers linear,l2r_sips",
        help="Train every recipe of a packaged folder on the same batches and compare routers.",
    )(compare)


def compare(
    folder: Annotated[str, typer.Argument(help="Packaged folder of recipes, e.g. demo.")],
    changes: Changes = None,
    routers: Annotated[
        str | None, typer.Option(help="Only these routers, separated by commas.")
    ] = None,
    seeds: Seeds = 1,
    out: Annotated[Path | None, typer.Option(help="Folder of the runs [runs/FOLDER].")] = None,
    as_json: AsJson = False,
) -> None:
    """Train, diagnose and report; runs that are finished are not trained again."""
    from l2r.cli.console import print_table
    from l2r.experiments.measure import diagnose_run
    from l2r.recipes.load import load_recipe, recipes_in
    from l2r.report.comparison import comparison_table, write_report
    from l2r.report.vision import SEED_MARK, accuracy_over_seeds, first_seeds, patch_sections
    from l2r.routers import router_names
    from l2r.runs.folder import RunFolder
    from l2r.training.loop import train

    loaded = {name: load_recipe(name, changes or []) for name in recipes_in(folder)}
    chosen = routers.split(",") if routers else router_names()
    by_kind: dict[str, str] = {}
    for name, recipe in loaded.items():  # ablations of a router come after it
        by_kind.setdefault(recipe.router_config().kind, name)
    for kind in chosen:
        if kind not in by_kind and routers:
            raise ValueError(f"routers must be among {', '.join(by_kind)}; got {kind!r}")
    root = out or Path("runs") / folder
    runs = []
    kinds = [kind for kind in chosen if kind in by_kind]
    for repeat, kind in product(range(seeds), kinds):
        recipe = loaded[by_kind[kind]]
        recipe = recipe.model_copy(update={"seed": recipe.seed + repeat})
        name = f"{kind}{SEED_MARK}{recipe.seed}" if repeat else kind
        run = RunFolder(root / name)
        result = train(recipe, run.path, label=name, report=lambda line: typer.echo(line, err=True))
        if not result.finished:
            typer.echo("stopped and saved; the same command goes on", err=True)
            raise typer.Exit(128 + (result.signal or 0))
        if not repeat and not run.diagnostics.is_file():
            run.write_json(run.diagnostics, diagnose_run(run, recipe))
        runs.append(run)
    shown = first_seeds(runs)
    results = accuracy_over_seeds(runs)
    print_table(results[0] if results else comparison_table(shown), as_json=as_json)
    more = patch_sections(shown)
    page = write_report(shown, root / "report.html", results=results, more=more)
    typer.echo(f"report: {page}", err=as_json)
