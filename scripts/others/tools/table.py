"""The table of dev/tools.md: a claim a row, and whether it holds for stock, swapped and own."""

from collections.abc import Mapping, Sequence

from scripts.others.tools.rows import Result

_HEAD = """# Other people's programs

Does a tool do with a swapped model, and with our own, what it does with a stock one? `make tools`
installs the versions below into `.tools`, tries every row on tiny models and writes this page.
**ok**: the claim holds. **as stock**: it fails, as it does for the stock model of the same family.
**fails**: it holds for stock and not here; then `make tools` fails too.

- Families: {families}.
- Versions: {versions}.
- Tried on a CPU, not on a GPU.
"""


def markdown(tables: Mapping[str, Sequence[Result]], versions: Mapping[str, str]) -> str:
    """The page."""
    families = {r.family for results in tables.values() for r in results if r.kind == "swapped"}
    said = ", ".join(f"{name} {number}" for name, number in versions.items())
    parts = [_HEAD.format(families=", ".join(sorted(families)), versions=said)]
    for tool, results in tables.items():
        lines = [f"## {tool}", "", "| what | stock | swapped | own |", "|---|---|---|---|"]
        for claim in dict.fromkeys(r.claim for r in results):
            cells = [_cell(results, claim, kind) for kind in ("stock", "swapped", "own")]
            lines.append(f"| {claim} | {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def is_worse(results: Sequence[Result]) -> bool:
    """Whether a claim holds for a stock model and not for one of ours of its family."""
    return any(r.error and not _stock(results, r).error for r in results)


def _stock(results: Sequence[Result], result: Result) -> Result:
    same = (result.claim, "stock", result.family)
    return next(r for r in results if (r.claim, r.kind, r.family) == same)


def _cell(results: Sequence[Result], claim: str, kind: str) -> str:
    rows = [r for r in results if (r.claim, r.kind) == (claim, kind)]
    failed = [r for r in rows if r.error]
    if not failed:
        return "ok"
    if kind == "stock":
        words = "fails"
    else:
        words = "fails" if any(not _stock(results, r).error for r in failed) else "as stock"
    if len(failed) == len(rows):
        return words
    return f"ok; {words}: {', '.join(r.family for r in failed)}"
