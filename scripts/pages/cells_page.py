"""Try the cells of tests/system/cells.py, and write their table into docs/swap.md.

    make cells
    PYTHONPATH=. python -m scripts.pages.cells_page [--minutes 30] [--only olmoe,mixtral] [--list]

All of them take hours. Results are in results/cells.jsonl, which is committed: a line a folder,
with the commit and the versions at which its cells were tried. The command goes on from there:
failed cells first, then those never tried, then those of other versions; with --again also those
of other commits. Covers of all pairs come first, then each family in one dtype, in the next, and
in the last. Exits 1 where a cell fails, or is no longer right that was so at an earlier commit
(results/cells-89d79bcd.jsonl). With --list nothing is tried; with --only the page stays; with
--minutes 0 the page alone is written.
"""

import argparse
import gc
import io
import json
import operator
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

for _name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("L2R_GUARD", "off")  # a kernel against plain code, which others test
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # threads cost more than small files

import torch  # noqa: E402

from l2r.cli import app  # noqa: E402
from l2r.hf.swap.families import FAMILIES  # noqa: E402
from scripts.pages.marks import with_section  # noqa: E402
from tests import quick  # noqa: E402
from tests.system import cells  # noqa: E402
from tests.system.cells import COMMANDS, DTYPES, KINDS, Cell, Folders  # noqa: E402

ROOT = Path(__file__).parents[2]
PAGE, KEPT, SECTION = ROOT / "docs" / "swap.md", ROOT / "results" / "cells.jsonl", "cells"
BEFORE = ROOT / "results" / "cells-89d79bcd.jsonl"  # before the cells were written
RIGHT, REFUSED, FAILED = "right", "refused", "failed"
NOT_RIGHT = (REFUSED, FAILED)
FOLDER = ("family", "dtype", "kind")
NAMES: tuple[Collection[str], ...] = (FAMILIES, DTYPES, KINDS, COMMANDS)
TEXT = """
**{tried:,} of {all:,} cells were tried: {right:,} are right, {refused:,} refused for a fact,
{failed:,} failed** ({made_with}; a CPU, small random models). A cell is a family, one of float32,
bf16 and fp16, a kind of folder, and a command or function that takes a model. An entry is right /
tried without the refused, of {each} in all{rest}. `results/cells.jsonl` has each result with its
commit and versions; `make cells` tries what is new. Kinds: {kinds}.

{table}
What is compared with what:

| command | number | reference |
|---|---|---|
{compared}

Refused:

{facts}
Failed: {failures}

**Against commit {commit}**, before these cells were written: its commands and functions, in its own
words, on the same folders, in {both:,} of the cells above: {families} families, {dtypes},
{kinds_there}. Its `l2r serve` refused transformers 5.24 and was let pass; `trainable` is without
selection biases, which it did not list. {lost}

| command | {commit}: right / refused / failed | now |
|---|---|---|
{changes}
"""


class Made(NamedTuple):
    """The commit and the versions of packages that a cell was tried with."""

    commit: str
    versions: str


class Outcome(NamedTuple):
    """State of a tried cell: right, refused or failed; why it is refused or has failed."""

    state: str
    why: str
    made: Made


def every_cell() -> list[Cell]:
    """Covers of all pairs, of some families and of all; the rest a dtype of each family at a time.

    Cells of a family and dtype stand together, for their folders are made from one another.
    """
    dtypes = tuple(DTYPES)
    covers = (cells.cover(), cells.cover(list(FAMILIES)))
    first = [c for cover in covers for c in sorted(cover, key=lambda c: _place(c)[:2])]
    rest = [
        Cell(family, dtypes[(number + row) % len(dtypes)], kind, command)
        for number in range(len(dtypes))
        for row, family in enumerate(FAMILIES)
        for kind in KINDS
        if kind != "own" or family == "olmoe"
        for command in COMMANDS
    ]
    return list(dict.fromkeys([*first, *rest]))


def _place(cell: Cell) -> tuple[int, ...]:
    return tuple(list(each).index(name) for each, name in zip(NAMES, cell, strict=True))


def made() -> Made:
    """Of this clone. A commit ends in "+" where sources or tests differ from it."""
    commit = _git("rev-parse", "--short=8", "HEAD").strip() or "unknown"
    changed = "+" if _git("status", "--porcelain", "--", "src", "tests") else ""
    packages = ("l2r-moe", "transformers", "torch")
    return Made(commit + changed, ", ".join(f"{name} {version(name)}" for name in packages))


def _git(*words: str) -> str:
    ended = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return ended.stdout


def kept(path: Path = KEPT) -> dict[Cell, Outcome]:
    """Outcomes by cell, the last of those tried twice; none of a family or command that is gone."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        said = json.loads(line)
        family, dtype, kind, *made_with = (said[name] for name in (*FOLDER, *Made._fields))
        why_of = {RIGHT: dict.fromkeys(said[RIGHT].split(), ""), **{s: said[s] for s in NOT_RIGHT}}
        for state, commands in why_of.items():
            for command, why in commands.items():
                found[Cell(family, dtype, kind, command)] = Outcome(state, why, Made(*made_with))
    return {cell: found[cell] for cell in found if all(map(operator.contains, NAMES, cell))}


def lines(found: Mapping[Cell, Outcome]) -> str:
    """Outcomes as lines of JSON, one of each folder, commit and versions."""
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for cell in sorted(found, key=_place):
        state, why, made_with = found[cell]
        key = (*cell[:3], *made_with)
        new = {**dict(zip((*FOLDER, *Made._fields), key, strict=True)), RIGHT: []}
        group = groups.setdefault(key, {**new, **{s: {} for s in NOT_RIGHT}})
        if state == RIGHT:
            group[RIGHT].append(cell.command)
        else:
            group[state][cell.command] = why
    return "".join(
        json.dumps({**group, RIGHT: " ".join(group[RIGHT])}) + "\n" for group in groups.values()
    )


def try_all(wanted: Sequence[Cell], path: Path, seconds: float) -> Iterator[tuple[Cell, Outcome]]:
    """Try cells until the time is over, and keep those of a folder as its last ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    end, made_with = time.monotonic() + seconds, made()
    with ExitStack() as stack, path.open("a", encoding="utf-8") as file:
        stack.enter_context(quick.coarse())
        stack.enter_context(quick.unchecked())
        for name in ("build_app", "get_command"):  # once, not by each command
            stack.enter_context(patch.object(app, name, cache(getattr(app, name))))
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder_of = Folders(place / "folders", cells.make_text(place))
        gc.collect()
        gc.freeze()  # Trainer collects garbage: not among all that is imported
        for _, group in groupby(wanted, key=lambda cell: cell[:3]):
            found: dict[Cell, Outcome] = {}
            try:
                for cell in group:
                    if time.monotonic() > end:
                        return
                    found[cell] = Outcome(*_try(cell, folder_of), made_with)
                    yield cell, found[cell]
            finally:
                file.write(lines(found))
                file.flush()


def _try(cell: Cell, folder_of: Folders) -> tuple[str, str]:
    quiet = io.StringIO()
    torch.manual_seed(0)
    with redirect_stdout(quiet), redirect_stderr(quiet), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            why = cells.try_cell(cell, folder_of)
        except Exception as error:
            folder_of.forget()  # a model may be as no other cell expects it
            said = " ".join(f"{type(error).__name__}: {error}".split())
            return FAILED, said if len(said) < 300 else f"{said[:100]} ... {said[-200:]}"
    return (REFUSED, why) if why else (RIGHT, "")


def section(
    found: Mapping[Cell, Outcome], wanted: Sequence[Cell], before: Mapping[Cell, Outcome]
) -> str:
    """The section as Markdown; ``before`` are outcomes at an earlier commit."""
    found = {cell: found[cell] for cell in wanted if cell in found}
    both = [cell for cell in found if cell in before]
    lost = ", ".join(f"`{cell}` ({found[cell].why})" for cell in lost_since(found, before))
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
        made_with=_made_with(found),
        rest="" if len(found) == len(wanted) else "; the others were not tried",
        each=len(DTYPES) * len(COMMANDS),
        kinds="; ".join(f"**{name}**: {make.__doc__}" for name, make in KINDS.items()),
        table=_table(found),
        compared="\n".join(_row(name, run.__doc__ or "") for name, run in COMMANDS.items()),
        facts="".join(_fact(why, facts) for why in dict.fromkeys(why for why, _ in facts)),
        failures=(", ".join(failures) or "none") + ".",
        commit=next(iter(before.values())).made.commit,
        both=len(both),
        families=len({cell.family for cell in both}),
        dtypes=" and ".join(dict.fromkeys(cell.dtype for cell in both)),
        kinds_there=" and ".join(dict.fromkeys(cell.kind for cell in both)),
        lost=f"Right there and not now: {lost or 'none'}.",
        changes="\n".join(_change(name, both, before, found) for name in COMMANDS),
    )


def lost_since(found: Mapping[Cell, Outcome], before: Mapping[Cell, Outcome]) -> list[Cell]:
    """Cells that were right and are not."""
    right = (cell for cell in found if cell in before and before[cell].state == RIGHT)
    return [cell for cell in right if found[cell].state != RIGHT]


def _change(command: str, both: Sequence[Cell], *sides: Mapping[Cell, Outcome]) -> str:
    counts = [Counter(side[c].state for c in both if c.command == command) for side in sides]
    shown = (" / ".join(f"{count[s]}" for s in (RIGHT, REFUSED, FAILED)) for count in counts)
    return f"| `{command}` | {' | '.join(shown)} |"


def _made_with(found: Mapping[Cell, Outcome]) -> str:
    versions = dict.fromkeys(outcome.made.versions for outcome in found.values())
    commits = Counter(outcome.made.commit for outcome in found.values())
    counts = [f"{commit} ({count:,})" for commit, count in commits.most_common()]
    return f"{'; '.join(versions)}; commit{'s' * (len(counts) > 1)} {', '.join(counts)}"


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


def remaining(
    wanted: Iterable[Cell], found: Mapping[Cell, Outcome], *, again: bool = False
) -> list[Cell]:
    """Failed ones first, those never tried, those of other versions; ``again``: other commits."""
    now = made()

    def turn(cell: Cell) -> int:
        if cell not in found:
            return 1
        state, _, made_with = found[cell]
        if state == FAILED:
            return 0
        if made_with.versions != now.versions or (again and made_with != now):
            return 2
        return 3

    return sorted((cell for cell in wanted if turn(cell) < 3), key=turn)


def main() -> int:
    """Try, then write or print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after that long")
    parser.add_argument("--only", help="families by commas")
    parser.add_argument("--again", action="store_true", help="also cells of other commits")
    parser.add_argument("--list", action="store_true", help="print what is kept; try nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    wanted = every_cell()
    chosen = wanted
    if options.only is not None:
        chosen = [cell for cell in wanted if cell.family in options.only.split(",")]
    if not options.list:
        left = remaining(chosen, kept(), again=options.again)
        for cell, (state, why, _) in try_all(left, KEPT, 60 * options.minutes):
            sys.stderr.write(f"{cell}: {state} {why}\n")
        KEPT.write_text(lines(kept()), encoding="utf-8")  # one line of each folder again
    found = kept()
    if not (options.list or options.only):
        text, written = PAGE.read_text(encoding="utf-8"), section(found, wanted, kept(BEFORE))
        PAGE.write_text(with_section(text, SECTION, written), encoding="utf-8")
    failed = {cell: found[cell] for cell in chosen if cell in found and found[cell][0] == FAILED}
    lost = {cell: found[cell] for cell in lost_since(found, kept(BEFORE)) if cell in chosen}
    not_right = failed | lost
    sys.stdout.write("".join(f"{cell}: {outcome.why}\n" for cell, outcome in not_right.items()))
    return 1 if not_right else 0


if __name__ == "__main__":
    sys.exit(main())
