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

from tests.hf.family_check import COLUMNS, FamilyResult, check_families

from l2r.hf.swap.families import FAMILIES, REFUSED
from l2r.report.tables import Table

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
TEXT = """# Model families

Made by `scripts/pages/families_page.py` with {versions} on a CPU. Every column was
run with a small random model of the family:

- `same_rule`: a linear router of ours with the old router's weights gives the old model's logits
  (to 1e-5), so the family's selection rule was kept.
- `swap`: the L2R router is seen by `capture`, and `output_router_logits=True` returns its logits.
- `train_step`: one SGD step on the language-modeling loss moves every router parameter and
  lowers the loss.
- `generate`: greedy generation with the cache equals generation without.
- `reload`: `save_pretrained`, then `l2r.load_pretrained` in another process: bit-equal logits.
- `compile`: `torch.compile(fullgraph=True)` gives the same logits (traced by AOTAutograd, experts
  as `batched_mm`, which compiles on CPUs in fp32).

{table}
Refused, with the reason the error gives:

{refused}"""


def page(results: Sequence[FamilyResult]) -> str:
    """The page as Markdown."""
    rows = [
        (family, *("yes" if works else "no" for works in checks))
        for family, *checks in map(astuple, results)
    ]
    table = Table("Router swap by model family", COLUMNS, tuple(rows))
    versions = f"transformers {version('transformers')}, torch {version('torch')}"
    refused = "".join(f"- `{name}`: {reason}.\n" for name, reason in REFUSED.items())
    return TEXT.format(versions=versions, table=table.to_markdown(), refused=refused)


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
