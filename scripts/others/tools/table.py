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


def features(results: Sequence[Result]) -> str:
    """Features in rows, tools in columns, with numbers of the notes below."""
    tools = list(dict.fromkeys(r.kind for r in results))
    families = list(dict.fromkeys(r.family for r in results))
    notes: dict[str, list[str]] = {}

    def words(result: Result) -> tuple[str, str]:
        kind, _, said = result.error.partition(": ")
        if not result.error:
            return "ok", ""
        note = said if kind in ("refused", "note") else result.error
        of = notes.setdefault(note, [])
        if result.family not in of:
            of.append(result.family)
        word = (
            "-" if said.startswith("not tried") else {"refused": "refused", "note": "ok"}.get(kind)
        )
        return word or "fails", f" {[*notes].index(note) + 1}"

    def cell(feature: str, tool: str) -> str:
        here = [words(r) for r in results if (r.claim, r.kind) == (feature, tool)]
        kinds = {word for word, _ in here}
        word = next(w for w in ("fails", "ok", "refused", "-") if w in kinds)
        missing = "" if len(here) == len(families) else ", not all families"
        return word + "".join(dict.fromkeys(number for _, number in here)) + missing

    lines = [f"| feature | {' | '.join(tools)} |", "|---" * (len(tools) + 1) + "|"]
    for feature in dict.fromkeys(r.claim for r in results):
        lines.append(f"| {feature} | {' | '.join(cell(feature, tool) for tool in tools)} |")
    said = [
        f"{number}. {note}." if len(of) == len(families) else f"{number}. {', '.join(of)}: {note}."
        for number, (note, of) in enumerate(notes.items(), start=1)
    ]
    return "\n".join([*lines, "", *said]) + "\n"


def fails(result: Result) -> bool:
    """Whether a cell of ``features`` is neither ok nor refused."""
    return bool(result.error) and result.error.partition(": ")[0] not in ("refused", "note")


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
