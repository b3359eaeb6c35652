"""Write the families of docs/swap.md: swap the routers of a small model of each, and check.

    PYTHONPATH=. python scripts/pages/families_page.py [--only olmoe,mixtral]

Takes some minutes. With --only the rows are printed and the page stays.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import astuple
from importlib.metadata import version
from pathlib import Path
from textwrap import wrap

from scripts.pages.marks import with_section
from tests.hf.family_check import COLUMNS, FamilyResult, check_families

from l2r.hf.swap.families import FAMILIES, REFUSED
from l2r.report.tables import Table

PAGE = Path(__file__).parents[2] / "docs" / "swap.md"
SECTION = "families"
TEXT = """
**{verdict}**
A small random model of each, on a CPU, with {versions}:

- `same_rule`: our linear router with the old weights gives the old logits to 1e-5.
- `swap`: `capture` and `output_router_logits=True` see the new router's logits.
- `train_step`: one SGD step moves every router parameter and lowers the loss.
- `generate`: greedy generation is the same with and without the cache.
- `reload`: saved and loaded in another process, the logits are equal to the bit.
- `compile`: `torch.compile(fullgraph=True)` gives the same logits.

### Supported

{supported}
{table}
### Refused

{refused}
"""


def section(results: Sequence[FamilyResult]) -> str:
    """The section as Markdown; families that fail a check stand in a table."""
    passed = [family for family, *checks in map(astuple, results) if all(checks)]
    rows = [
        (family, *("yes" if works else "no" for works in checks))
        for family, *checks in map(astuple, results)
        if not all(checks)
    ]
    some = (
        f"{len(passed)} of {len(results)} families pass all six checks; the table has the others."
    )
    verdict = some if rows else f"All {len(passed)} families pass all six checks."
    table = Table("Families that fail a check", COLUMNS, tuple(rows)).to_markdown() if rows else ""
    return TEXT.format(
        verdict=verdict,
        versions=f"transformers {version('transformers')}, torch {version('torch')}",
        supported="\n".join(wrap(", ".join(f"`{family}`" for family in passed) + ".", 100)),
        table=f"\n{table}" if table else "",
        refused="".join(f"- `{name}`: {reason}.\n" for name, reason in REFUSED.items()),
    )


def main() -> int:
    """Check, then write or print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="families by commas")
    only = parser.parse_args().only
    results = list(check_families(list(FAMILIES) if only is None else only.split(",")))
    if only is None:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_section(text, SECTION, section(results)), encoding="utf-8")
    else:
        sys.stdout.write("".join(f"{result}\n" for result in results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
