"""Mutation tests, room by room: change one place of the source, see whether a test turns red.

    python -m scripts.proofs.mutants [ROOM ...] [--sample 60] [--again] [--work .mutants]
    python -m scripts.proofs.mutants --by-hand [--fast] [--only 3,7] [--again]

Cosmic Ray lists the mutants; each room has a sample chosen by a hash (0 for all). A copy of the
tracked files is mutated, never this checkout. One process imports torch once and forks for every
mutant, whose room's tests run until the first failure. Results are kept in WORK/ROOM.sqlite, so
that a stopped run resumes; mutants of a changed source file are tried again, survivors with
``--again``. The table and the open survivors go to dev/mutants.md; those that change nothing are
in mutants_explained.yaml. ``--by-hand`` tries the changes of mutants_by_hand.yaml; see by_hand.py.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from scripts.proofs import by_hand
from scripts.proofs.mutant_trees import ROOT, copy_tree, run_tests

PAGE = ROOT / "dev" / "mutants.md"
EXPLAINED = Path(__file__).with_name("mutants_explained.yaml")
PRELOADED = (
    "scipy.stats", "torch.distributed.fsdp", "hypothesis", "pytest", "peft",
    "transformers.models.olmoe.modeling_olmoe",
)  # fmt: skip
# Annotations such as ``int | None`` are no code of ours; a removed decorator rarely imports.
LEFT_OUT = ("core/ReplaceBinaryOperator_BitOr_", "core/RemoveDecorator")


class Room(NamedTuple):
    """sources: globs below src, without __init__ files. tests: arguments of pytest, the
    fastest first. seconds: limit of one mutant."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]
    seconds: int = 120


ROOMS = {
    "functional": Room(
        ("l2r/functional/*.py",), ("tests/functional", "tests/paper/test_equations.py")
    ),
    "routers": Room(
        ("l2r/routers/*.py", "l2r_lab/routers/*.py"),
        (
            "tests/routers",
            "tests/l2r_lab/routers",
            "tests/analysis/diagnostics/test_collect.py",
            "tests/hf/models/test_olmoe.py",
        ),
    ),
    "moe": Room(("l2r/moe/*.py",), ("tests/moe",)),
    "swap": Room(("l2r/hf/swap/*.py",), ("tests/hf/swap",)),
    "training": Room(
        ("l2r_lab/training/*.py",),
        (
            "tests/l2r_lab/training", "--ignore=tests/l2r_lab/training/data",
            "--ignore=tests/l2r_lab/training/recipes",
        ),
        240,
    ),
    "certificates": Room(("l2r/analysis/certificates/*.py",), ("tests/analysis/certificates",)),
    "stats": Room(
        (
            "l2r/stats/*.py", "l2r_lab/stats/*.py", "l2r/files/final_losses.py",
            "l2r_lab/files/progress.py",
        ),
        (
            "tests/stats", "tests/l2r_lab/stats", "tests/files",
            "tests/l2r_lab/files", "tests/l2r_lab/report/test_comparison.py",
            "tests/l2r_lab/studies/test_sweep.py",
        ),
    ),
    "verdicts": Room(
        (
            "l2r_lab/studies/judging.py", "l2r_lab/report/comparison.py",
            "l2r_lab/report/evidence.py", "l2r/report/tables.py",
        ),
        (
            "tests/report", "tests/l2r_lab/report", "tests/l2r_lab/studies/test_results.py",
            "tests/l2r_lab/studies/test_studies.py", "tests/l2r_lab/studies/test_plans.py",
        ),
    ),
}  # fmt: skip


def main() -> int:
    """Run the rooms, write the page; exit code 1 where a room finds less than nine in ten."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="*", default=list(ROOMS), help=", ".join(ROOMS))
    parser.add_argument("--sample", type=int, default=60, help="mutants of a room; 0 for all")
    parser.add_argument("--again", action="store_true", help="try survivors again: tests changed")
    parser.add_argument("--work", type=Path, default=ROOT / ".mutants")
    parser.add_argument("--page-only", action="store_true", help="write the page, run nothing")
    parser.add_argument("--by-hand", action="store_true", help="the changes made by hand")
    parser.add_argument("--fast", action="store_true", help="by hand: no slow tests")
    parser.add_argument("--only", default="", help="by hand: numbers of changes, with commas")
    options = parser.parse_args()
    for room in options.rooms:
        if room not in ROOMS:
            parser.error(f"room must be one of {', '.join(ROOMS)}; got {room}")
    options.work.mkdir(parents=True, exist_ok=True)
    if not options.page_only:
        for module in PRELOADED:
            __import__(module)
    if options.by_hand:
        if not options.page_only:
            only = [int(number) for number in options.only.split(",") if number]
            by_hand.run(options.work, only, fast=options.fast, again=options.again)
        return by_hand.write(PAGE, options.work)
    if not options.page_only:
        for room in options.rooms:
            run_room(room, options.work, options.sample, again=options.again)
    return write_page(options.work)


def run_room(name: str, work: Path, sample: int, *, again: bool) -> None:
    """Test the mutants of a room that have no result yet, and survivors again if asked."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator
    from cosmic_ray.work_db import WorkDB, use_db
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

    room, tree = ROOMS[name], work / f"{name}-tree"
    copy_tree(tree)
    with use_db(str(work / f"{name}.sqlite"), WorkDB.Mode.create) as database:
        chosen = plan(database, room, tree, sample)
        pending = {item.job_id for item in database.pending_work_items}
        if again:
            pending |= {i.job_id for i, r in database.completed_work_items if not r.is_killed}
        todo = [item for item in chosen if item.job_id in pending]
        if todo and _test(tree, room) != 0:
            sys.exit(f"{name}: the tests fail before anything is changed")
        for number, item in enumerate(todo, start=1):
            (mutation,) = item.mutations
            path = ROOT / mutation.module_path
            source = path.read_text(encoding="utf-8")
            operator = get_operator(mutation.operator_name)(**mutation.operator_args)
            mutant = mutate_code(source, operator, mutation.occurrence)
            place = tree / mutation.module_path
            start = time.monotonic()
            place.write_text(mutant, encoding="utf-8")
            try:
                survived = _test(tree, room, first=path.stem) == 0
            finally:
                place.write_text(source, encoding="utf-8")
            outcome = TestOutcome.SURVIVED if survived else TestOutcome.KILLED
            difference = "\n".join(changed_lines(source, mutant))
            result = WorkResult(WorkerOutcome.NORMAL, "", outcome, difference)
            database.set_result(item.job_id, result)
            seconds = time.monotonic() - start
            word = "SURVIVED" if survived else "found"
            print(
                f"{name} [{number}/{len(todo)}] {word} {seconds:.1f} s "
                f"{mutation.module_path}:{mutation.start_pos[0]} {mutation.operator_name}",
                flush=True,
            )


def plan(database: Any, room: Room, tree: Path, sample: int) -> list[Any]:
    """The sampled mutants, in an order of a hash; those of unchanged files keep their results."""
    from cosmic_ray.commands.init import _all_work_items

    files = [
        path.relative_to(ROOT)
        for pattern in room.sources
        for path in sorted((ROOT / "src").glob(pattern))
        if path.name != "__init__.py"
    ]
    fresh = {}
    for item in _all_work_items(files, {}):
        (mutation,) = item.mutations
        if not mutation.operator_name.startswith(LEFT_OUT):
            text = (ROOT / mutation.module_path).read_bytes()
            facts = f"{mutation.module_path} {mutation.operator_name} {mutation.operator_args}"
            key = hashlib.sha256(f"{facts} {mutation.occurrence} ".encode() + text).hexdigest()
            fresh[key] = type(item)(key, item.mutations)
    chosen = sorted(fresh)[: sample or None]
    known = {item.job_id for item in database.work_items}
    database.add_work_items([fresh[key] for key in chosen if key not in known])
    return [fresh[key] for key in chosen]


def _test(tree: Path, room: Room, first: str = "") -> int:
    """Exit code of the room's tests; 124 after the limit.

    Tests of files named after the module ``first`` come first: they find most, and the rest waits.
    """
    near = [
        str(p.relative_to(tree)) for p in sorted(tree.glob(f"tests/**/test_{first}*.py")) if first
    ]
    folders = tuple(name for name in room.tests if not name.endswith(".py"))
    near = [name for name in near if name.startswith(folders)]
    return run_tests(tree, (*near, *room.tests), room.seconds).code


def changed_lines(source: str, mutant: str) -> Iterator[str]:
    """The lines that differ, with - and +."""
    before, after = source.splitlines(), mutant.splitlines()
    for old, new in zip(before, after, strict=False):
        if old != new:
            yield from (f"- {old.strip()}", f"+ {new.strip()}")


def write_page(work: Path) -> int:
    """Write dev/mutants.md from all results that belong to the source as it stands."""
    from cosmic_ray.work_db import WorkDB, use_db

    reasons: dict[str, str] = {}
    if EXPLAINED.is_file():
        reasons = {e["change"].strip(): e["why"] for e in yaml.safe_load(EXPLAINED.read_text())}
    rows, sections, weak = [], [], False
    for name, room in ROOMS.items():
        path = work / f"{name}.sqlite"
        if not path.is_file():
            continue
        with use_db(str(path), WorkDB.Mode.open) as database:
            current = {i.job_id for i in plan(database, room, work, 0)}
            done = [(i, r) for i, r in database.completed_work_items if i.job_id in current]
        survivors = [(i.mutations[0], r) for i, r in done if not r.is_killed]
        known = sum(r.diff.strip() in reasons for _, r in survivors)
        open_ones = len(survivors) - known
        share = 1 - open_ones / max(1, len(done) - known)
        weak |= share < 0.9
        counts = (len(current), len(done), len(done) - len(survivors), known, open_ones)
        rows.append(f"| {name} | {' | '.join(map(str, counts))} | {share:.1%} |")
        if open_ones:
            sections.append(f"\n## {name}: open survivors\n")
        for mutation, result in sorted(
            survivors, key=lambda s: (str(s[0].module_path), s[0].start_pos)
        ):
            if result.diff.strip() not in reasons:
                place = f"{mutation.module_path}:{mutation.start_pos[0]}"
                sections.append(f"{place}\n\n```diff\n{result.diff}\n```\n")
    head = (
        "# Mutants\n\nOne place of the source is changed; do the room's tests notice? Made by "
        "`make mutants` (scripts/proofs/mutants.py).\n"
        "Mutants that change nothing that can be observed are explained in\n"
        "`scripts/proofs/mutants_explained.yaml` and not counted in the share.\n\n"
        "| room | mutants | tried | found | explained | open | found of the rest |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    PAGE.parent.mkdir(exist_ok=True)
    drawn = by_hand.section(PAGE.read_text(encoding="utf-8")) if PAGE.is_file() else ""
    PAGE.write_text(head + "\n".join(rows) + f"\n{drawn}" + "\n".join(sections), encoding="utf-8")
    print("\n".join(rows))
    return int(weak)


if __name__ == "__main__":
    sys.exit(main())
