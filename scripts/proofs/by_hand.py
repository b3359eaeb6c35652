"""Changes made by hand, each seen under two conditions at once: which tests notice them.

mutants_by_hand.yaml lists them. Each is tried in a copy of the tracked files, first on the fast
tests of its list, then on the slow ones. Results are kept in WORK/by-hand.json; a change whose
entry or file is another since is tried again, survivors with ``again``. Random operators
(mutants.py) hit lines; these hit what a user would get wrong.
"""

import hashlib
import json
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from scripts.proofs.mutant_trees import ROOT, copy_tree, run_tests

LIST = Path(__file__).with_name("mutants_by_hand.yaml")
_SECONDS = {"fast": 420, "slow": 900}
_MARKS = {"fast": "not slow", "slow": "slow"}
_NO_TESTS = 5  # pytest's exit code where a mark leaves none
TITLE = "\n## Changes made by hand\n"


def run(work: Path, only: Collection[int] = (), *, fast: bool = False, again: bool = False) -> None:
    """Try the changes that have no result, those numbered ``only`` if any are; survivors again."""
    tree, path = work / "by-hand-tree", work / "by-hand.json"
    copy_tree(tree)
    known = json.loads(path.read_text()) if path.is_file() else {}
    for entry in yaml.safe_load(LIST.read_text()):
        if only and entry["n"] not in only:
            continue
        key, former = _key(entry), known.get(str(entry["n"]), {})
        if former.get("key") == key:
            if former["found"] == "fast" or (not again and (fast or former["slow_ran"])):
                continue
        else:
            former = {}
        start = time.monotonic()
        found, test, slow_ran = _try(entry, tree, fast, skip_fast=bool(former) and not again)
        known[str(entry["n"])] = {"key": key, "found": found, "test": test, "slow_ran": slow_ran}
        path.write_text(json.dumps(known, indent=1))
        took = time.monotonic() - start
        print(f"{entry['n']} {entry['room']}: {found} {test} {took:.0f} s", flush=True)


def _try(
    entry: dict[str, Any], tree: Path, fast: bool, *, skip_fast: bool
) -> tuple[str, str, bool]:
    """What found a change, and the test; whether slow tests ran or had no need to."""
    place = tree / "src" / entry["file"]
    source = place.read_text(encoding="utf-8")
    if source.count(entry["old"]) != 1:
        return "stale", "", True
    place.write_text(source.replace(entry["old"], entry["new"]), encoding="utf-8")
    try:
        for kind, mark in _MARKS.items():
            if (kind == "slow" and fast) or (kind == "fast" and skip_fast):
                continue
            for tests in entry["tests"]:
                if not (tree / tests.partition("::")[0]).exists():
                    raise FileNotFoundError(f"change {entry['n']} names {tests}, which is gone")
                outcome = run_tests(tree, ("-m", mark, tests), _SECONDS[kind])
                if outcome.code not in (0, _NO_TESTS):
                    return kind, outcome.failed or f"{tests}: exit code {outcome.code}", True
    finally:
        place.write_text(source, encoding="utf-8")
    return "nothing", "", not fast


def _key(entry: dict[str, Any]) -> str:
    text = (ROOT / "src" / entry["file"]).read_bytes()
    return hashlib.sha256(repr([entry["old"], entry["new"]]).encode() + text).hexdigest()


def section(page: str) -> str:
    """The part of dev/mutants.md on these changes; empty where there is none."""
    start = page.find(TITLE)
    end = page.find("\n## ", start + len(TITLE))
    return "" if start < 0 else page[start : end if end > 0 else None]


def write(page: Path, work: Path) -> int:
    """Write that part anew, by the results in ``work``; 1 where less than nine in ten are found."""
    entries = yaml.safe_load(LIST.read_text())
    known = json.loads((work / "by-hand.json").read_text())
    tried = [(e, known[str(e["n"])]) for e in entries if str(e["n"]) in known]
    rooms = dict.fromkeys(entry["room"] for entry, _ in tried)
    rows = {room: [(e, r) for e, r in tried if e["room"] == room] for room in rooms}
    rows["all"] = tried
    kinds = ("fast", "slow", "nothing", "stale")
    lines = [
        TITLE,
        "Each shows under two conditions at once, which were written down before a test was run "
        "(`make mutants HAND=1`,\nscripts/proofs/mutants_by_hand.yaml). At first: before tests "
        "of their kind were written for those that no fast test\nhad found.\n",
        "| room | tried | at first by fast tests | now by fast tests | by slow ones alone "
        "| by nothing | stale |",
        f"|{'---|' * 7}",
    ]
    for room, pairs in rows.items():
        first = sum(entry.get("at_first") == "fast" for entry, _ in pairs)
        now = [sum(result["found"] == kind for _, result in pairs) for kind in kinds]
        lines.append(f"| {' | '.join(map(str, (room, len(pairs), first, *now)))} |")
    for entry, result in tried:
        if result["found"] in ("nothing", "stale"):
            where = f"src/{entry['file']} (change {entry['n']})"
            lines.append(f"\n{result['found'].capitalize()}: {where}, {entry['under']}.")
    text, new = page.read_text(encoding="utf-8"), "\n".join(lines) + "\n"
    old = section(text)
    if old:
        text = text.replace(old, new)
    else:
        before, mark, after = text.partition("\n## ")
        text = f"{before}{new}{mark}{after}"
    page.write_text(text, encoding="utf-8")
    print("\n".join(lines))
    found = sum(result["found"] in ("fast", "slow") for _, result in tried)
    return int(found < 0.9 * len(tried))
