"""Write the families of docs/swap.md: every MoE architecture of transformers, what we do with it,
and for each supported family the swap of a small model, checked.

    make families
    PYTHONPATH=. python scripts/pages/families_page.py [--list | --only olmoe,mixtral]

Takes some minutes; exits 1 where an architecture was not looked at, or a family fails a check.
With --list nothing is swapped; with it and with --only, rows are printed and the page stays.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import astuple
from importlib.metadata import version
from pathlib import Path
from textwrap import wrap

from l2r.hf.swap import rules
from l2r.hf.swap.families import FAMILIES
from l2r.report.tables import Table
from scripts.pages.architectures import (
    NEW,
    RECOGNIZED,
    REFUSAL,
    SUPPORTED,
    Architecture,
    architectures,
)
from scripts.pages.marks import with_section
from scripts.pages.recognized import looked_at
from tests.hf.family_check import COLUMNS, FamilyResult, check_families

PAGE = Path(__file__).parents[2] / "docs" / "swap.md"
SECTION = "families"
TEXT = """
**{counts}**
{verdict}
A small random model of each, on a CPU, with {versions}:

- `same_rule`: our linear router with the old weights gives the old logits to 1e-5.
- `swap`: `capture` and `output_router_logits=True` see the new router's logits.
- `train_step`: one SGD step moves every router parameter and lowers the loss.
- `generate`: greedy generation is the same with and without the cache.
- `reload`: saved and loaded in another process, the logits are equal to the bit.
- `compile`: `torch.compile(fullgraph=True)` gives the same logits.

### Supported

{supported}
{table}{exceptions}
### Refused

{refused}{recognized}
"""


def section(results: Sequence[FamilyResult], found: Sequence[Architecture]) -> str:
    """The section as Markdown; families that fail a check stand in a table of their own."""
    passed = [result for result in results if _passes(result)]
    rows = [
        (family, *("no" if works is False else "yes" if works else "-" for works in checks))
        for family, *checks in map(astuple, results)
        if False in checks
    ]
    verdict = (
        f"None of the {len(results)} families fails a check; below the table: checks not made."
    )
    if rows:
        verdict = (
            f"{len(passed)} of {len(results)} families pass all six checks; the table has the "
            "others."
        )
    recognized = _with_reasons(found, RECOGNIZED)
    failed = Table("Families that fail a check", COLUMNS, tuple(rows)).to_markdown() if rows else ""
    return TEXT.format(
        counts=_counts(found),
        verdict=verdict,
        versions=f"transformers {version('transformers')}, torch {version('torch')}",
        supported=_by_rule([result.family for result in passed]),
        table=f"\n{failed}" if failed else "",
        exceptions=_exceptions(results),
        refused=_with_reasons(found, REFUSAL),
        recognized=f"\n### Recognized\n\n{recognized}" if recognized else "",
    )


def _with_reasons(found: Sequence[Architecture], state: str) -> str:
    return "".join(f"- `{a.name}`: {a.why}.\n" for a in found if a.state == state)


def _counts(found: Sequence[Architecture]) -> str:
    states = [architecture.state for architecture in found]
    short = ".".join(version("transformers").split(".")[:2])
    text = (
        f"transformers {short} has {len(found)} MoE architectures: {states.count(SUPPORTED)} are "
        f"supported, {states.count(REFUSAL)} refused"
    )
    rest = [f", {states.count(state)} {state}" for state in (RECOGNIZED, NEW) if state in states]
    return f"{text}{''.join(rest)}."


def _by_rule(families: Sequence[str]) -> str:
    """A table of the families that select alike, by the rule's name."""
    names = {rule: name for name, rule in vars(rules).items() if callable(rule)}
    groups: dict[str, list[str]] = {}
    for family in families:
        groups.setdefault(names[FAMILIES[family].rule], []).append(f"`{family}`")
    rows = [f"| `{rule}` | {', '.join(members)} |" for rule, members in groups.items()]
    return "\n".join(("| rule | families |", "|---|---|", *rows)) + "\n"


def _exceptions(results: Sequence[FamilyResult]) -> str:
    """Which checks say nothing for which family."""
    reasons = {
        "generate": "it classifies tokens",
        "compile": "transformers' own model does not compile either",
    }
    lines = []
    for check, reason in reasons.items():
        names = [f"`{r.family}`" for r in results if getattr(r, check) is None]
        if names:
            lines.append(f"No `{check}` for {', '.join(names)}: {reason}.")
    return "".join("\n" + "\n".join(wrap(line, 100)) + "\n" for line in lines)


def _passes(result: FamilyResult) -> bool:
    return False not in astuple(result)


def main() -> int:
    """Check, then write or print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="families by commas")
    parser.add_argument("--list", action="store_true", help="architectures and their states")
    options = parser.parse_args()
    if options.only is not None:
        results = list(check_families(options.only.split(",")))
        sys.stdout.write("".join(f"{result}\n" for result in results))
        return 0 if all(map(_passes, results)) else 1
    found = [looked_at(architecture) for architecture in architectures()]
    new = [architecture for architecture in found if architecture.state == NEW]
    if options.list:
        for name, state, families, why in map(astuple, found):
            sys.stdout.write(f"{name}: {state} {why or ', '.join(families)}\n")
    else:
        results = list(check_families(list(FAMILIES)))
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_section(text, SECTION, section(results, found)), encoding="utf-8")
    for architecture in new:
        sys.stderr.write(f"not looked at: {architecture.name} ({architecture.why})\n")
    return 1 if new or not (options.list or all(map(_passes, results))) else 0


if __name__ == "__main__":
    sys.exit(main())
