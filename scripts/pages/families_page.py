"""Write docs/families.md: swap the routers of small models of all supported families, and check.

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

from tests.hf.family_check import COLUMNS, FamilyResult, check_families

from l2r.hf.swap.families import FAMILIES, REFUSED
from l2r.report.tables import Table

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
TEXT = """# Model families

**{verdict}** Made by `scripts/pages/families_page.py` on a CPU, with a small random model of each
family and {versions}. The checks:

- `same_rule`: a linear router of ours with the old router's weights gives the old model's logits
  (to 1e-5), so the family's selection rule was kept.
- `swap`: `capture` sees the L2R router, and `output_router_logits=True` returns its logits.
- `train_step`: one SGD step moves every router parameter and lowers the loss.
- `generate`: greedy generation with the cache equals generation without.
- `reload`: `save_pretrained`, then `l2r.load_pretrained` in another process: bit-equal logits.
- `compile`: `torch.compile(fullgraph=True)` gives the same logits (AOTAutograd; experts as
  `batched_mm`, which compiles on CPUs in fp32).

## Supported

{supported}
{table}
## Refused

With the reason that the error gives:

{refused}"""


def page(results: Sequence[FamilyResult]) -> str:
    """The page as Markdown; families that fail a check stand in a table."""
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
        PAGE.write_text(page(results), encoding="utf-8")
    else:
        sys.stdout.write("".join(f"{result}\n" for result in results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
