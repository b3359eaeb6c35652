"""``l2r doctor``: what works on this machine, and what to install for what does not."""

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "doctor",
        epilog="Example: l2r doctor --json",
        help="Check this machine: versions, grouped_mm, the router, accelerators, extras.",
    )(doctor)


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print records as JSON.")] = False,
) -> None:
    """Run every check and print one line each; exit code 1 when a needed one fails."""
    from l2r.cli.checks import run_checks
    from l2r.cli.console import print_table
    from l2r.report.tables import Table

    checks = run_checks()
    rows = tuple((c.name, c.status, c.detail) for c in checks)
    print_table(Table("l2r doctor", ("check", "status", "detail"), rows), as_json=json)
    if any(check.status == "failed" for check in checks):
        raise typer.Exit(1)
