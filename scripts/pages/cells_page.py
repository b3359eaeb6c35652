"""Try the cells of tests/system/cells.py, and write their table into docs/swap.md.

    make cells
    PYTHONPATH=. python -m scripts.pages.cells_page [--minutes 30] [--only olmoe,mixtral] [--list]

All of them take hours. Each is kept in .cells/cells.jsonl as it ends, so that the command goes on
where it stopped; failed ones, and those of other versions, are tried again. Covers of all pairs
come first, then folders in a mixed order, so that a part is a sample of all. Exits 1 where a cell
fails. With --list nothing is tried; with --only the page stays.
"""

import argparse
import hashlib
import io
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

for _name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("L2R_GUARD", "off")  # a kernel against plain code, which others test

import torch  # noqa: E402
from scripts.pages.marks import with_section  # noqa: E402
from tests import quick  # noqa: E402
from tests.system import cells  # noqa: E402
from tests.system.cells import COMMANDS, DTYPES, KINDS, Cell, Folder  # noqa: E402

from l2r.hf.swap.families import FAMILIES  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGE, KEPT, SECTION = ROOT / "docs" / "swap.md", ROOT / ".cells" / "cells.jsonl", "cells"
RIGHT, REFUSED, FAILED = "right", "refused", "failed"
TEXT = """
**{tried:,} of {all:,} cells were tried: {right:,} are right, {refused:,} refused for a fact,
{failed:,} failed** ({versions}, a CPU, small random models). A cell is a family, one of float32,
bf16 and fp16, a kind of folder, and a command or function that takes a model. An entry is right /
tried without the refused, of {each} in all; the others were not tried. Kinds: {kinds}.

{table}
What is compared with what:

| command | number | reference |
|---|---|---|
{compared}

Refused:

{facts}
Failed: {failures}
"""


class Outcome(NamedTuple):
    """State of a tried cell (right, refused or failed), and the reason of a refusal or failure."""

    state: str
    why: str = ""


def every_cell() -> list[Cell]:
    """Covers of all pairs, of some families and of all; the others a folder at a time, mixed."""
    whole = [
        Cell(family, dtype, kind, command)
        for family in FAMILIES
        for dtype in DTYPES
        for kind in KINDS
        if kind != "own" or family == "olmoe"
        for command in COMMANDS
    ]
    first = dict.fromkeys([*cells.cover(), *cells.cover(list(FAMILIES))])
    rest = [cell for cell in whole if cell not in first]
    return [*first, *sorted(rest, key=lambda c: hashlib.sha256("-".join(c[:3]).encode()).digest())]


def versions() -> str:
    """Names and versions of the packages that a cell tests."""
    return ", ".join(f"{name} {version(name)}" for name in ("l2r-moe", "transformers", "torch"))


def kept(path: Path = KEPT) -> dict[Cell, Outcome]:
    """Outcomes by cell; of cells that were tried twice the last, of other versions none."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        *cell, made_with, state, why = json.loads(line)
        if made_with == versions():
            found[Cell(*cell)] = Outcome(state, why)
    return found


def try_all(wanted: Sequence[Cell], path: Path, seconds: float) -> Iterator[tuple[Cell, Outcome]]:
    """Try cells until the time is over, and keep each as it ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    with ExitStack() as stack, path.open("a", encoding="utf-8") as file:
        stack.enter_context(quick.coarse())
        stack.enter_context(quick.unchecked())
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        text = cells.make_text(root)
        for _, group in groupby(wanted, key=lambda cell: cell[:3]):
            with tempfile.TemporaryDirectory(dir=root) as place:
                made: dict[str, Folder] = {}
                for cell in group:
                    if time.monotonic() > end:
                        return
                    outcome = _try(cell, Path(place), made, text)
                    line = json.dumps([*cell, versions(), *outcome])
                    file.write(f"{line}\n")
                    file.flush()
                    yield cell, outcome


def _try(cell: Cell, place: Path, made: dict[str, Folder], text: object) -> Outcome:
    def folder_of(family: str, dtype: str, kind: str) -> Folder:
        if kind not in made:
            made[kind] = Folder(family, dtype, kind, place, text)
        return made[kind]

    quiet = io.StringIO()
    torch.manual_seed(0)
    with redirect_stdout(quiet), redirect_stderr(quiet), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            why = cells.try_cell(cell, folder_of)
        except Exception as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())
            return Outcome(FAILED, said if len(said) < 300 else f"{said[:100]} ... {said[-200:]}")
    return Outcome(REFUSED, why) if why else Outcome(RIGHT)


def section(found: Mapping[Cell, Outcome], wanted: Sequence[Cell]) -> str:
    """The section as Markdown."""
    found = {cell: found[cell] for cell in wanted if cell in found}
    states = Counter(outcome.state for outcome in found.values())
    facts = Counter(
        (outcome.why, cell.command if _of_command(outcome.why) else cell.family)
        for cell, outcome in found.items()
        if outcome.state == REFUSED
    )
    failures = [f"`{c}` ({o.why})" for c, o in found.items() if o.state == FAILED]
    return TEXT.format(
        tried=len(found),
        all=len(wanted),
        **{state: states[state] for state in (RIGHT, REFUSED, FAILED)},
        versions=versions(),
        each=len(DTYPES) * len(COMMANDS),
        kinds="; ".join(f"**{name}**: {make.__doc__}" for name, make in KINDS.items()),
        table=_table(found),
        compared="\n".join(_row(name, run.__doc__ or "") for name, run in COMMANDS.items()),
        facts="".join(_fact(why, facts) for why in dict.fromkeys(why for why, _ in facts)),
        failures=(", ".join(failures) or "none") + ".",
    )


def _of_command(why: str) -> bool:
    return any(fact.why == why and not fact.families for fact in cells.FACTS)


def _row(name: str, words: str) -> str:
    number, _, reference = " ".join(words.split()).partition("; ")
    return f"| `{name}` | {number} | {reference} |"


def _fact(why: str, facts: Mapping[tuple[str, str], int]) -> str:
    names = sorted({name for each, name in facts if each == why})
    count = sum(count for (each, _), count in facts.items() if each == why)
    return f"- {', '.join(f'`{name}`' for name in names)}: {why} ({count:,} cells).\n"


def _table(found: Mapping[Cell, Outcome]) -> str:
    """Right cells of those tried, by family and kind; refused ones are among neither."""
    right, tried = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for cell, outcome in found.items():
        tried[cell.family, cell.kind] += outcome.state != REFUSED
        right[cell.family, cell.kind] += outcome.state == RIGHT
    rows = [["family", *KINDS], ["---"] * (1 + len(KINDS))]
    for family in FAMILIES:
        counts = ((right[family, kind], tried[family, kind]) for kind in KINDS)
        rows.append([f"`{family}`", *(f"{a}/{b}" if b else "" for a, b in counts)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _remaining(wanted: Iterable[Cell], found: Mapping[Cell, Outcome]) -> list[Cell]:
    """Failed ones first, then those that were not tried."""
    left = [cell for cell in wanted if cell not in found or found[cell].state == FAILED]
    return sorted(left, key=lambda cell: cell not in found)


def main() -> int:
    """Try, then write or print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after that long")
    parser.add_argument("--only", help="families by commas")
    parser.add_argument("--list", action="store_true", help="print what is kept; try nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = every_cell()
    chosen = wanted
    if options.only is not None:
        chosen = [cell for cell in wanted if cell.family in options.only.split(",")]
    if not options.list:
        for cell, (state, why) in try_all(_remaining(chosen, kept()), KEPT, 60 * options.minutes):
            sys.stderr.write(f"{cell}: {state} {why}\n")
    found = kept()
    if not (options.list or options.only):
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_section(text, SECTION, section(found, wanted)), encoding="utf-8")
    failed = {cell: found[cell] for cell in chosen if cell in found and found[cell][0] == FAILED}
    sys.stdout.write("".join(f"{cell}: {outcome.why}\n" for cell, outcome in failed.items()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
