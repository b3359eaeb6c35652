"""Numbers of short seeded runs in two source trees, to the last digit.

    python scripts/proofs/seeded_losses.py BEFORE AFTER [--steps 30] [--only demo/linear]
        [--parts losses,diagnosis,study,verdict]

BEFORE and AFTER are checkouts of this repository. Each one's own commands run on one machine with
one thread, and every number that both report must be the same:

losses      every demo recipe, trained for a few steps: metrics.jsonl
diagnosis   `l2r compare` and `l2r diagnose` of a short run of two demo recipes: diagnosis.json,
            with a checksum of every array, of text.npz and of patches.npz
study       a plan of two arms and two seeds, four steps each: stored measures and verdicts
verdict     `l2r evidence decision --judge-only --json` of the committed results

Exit code 1 names what differs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

ROUTERS = ("linear", "linear-sips", "xmoe", "l2r-dot", "l2r-cosine", "l2r-sips")
RECIPES = [f"{demo}/{router}" for demo in ("demo", "demo-vision") for router in ROUTERS]
NUMBERS = ("ce", "balance", "z", "grad_norm", "ce/mean", "top1")
DIAGNOSED = ("demo", "demo-vision")
SHORT = ("training.steps=4", "evaluation.max_batches=2")
PLAN = """
title: Two arms
question: Do two source trees measure the same?
recipe: demo/linear
changes: [model.num_hidden_layers=2, data.corpus_version=2, evaluation.max_batches=2]
tokens: 8192
seeds: {least: 2, most: 2}
margins: {validation_ce: 0.5}
sample: 512
arms: {linear: [], sharp: [router.temperature=0.5]}
contrasts:
- {first: sharp, second: linear, metric: validation_ce, primary: true}
- {first: sharp, second: linear, metric: load_entropy, better: larger}
"""
Numbers = dict[tuple[Any, ...], Any]


def command(checkout: Path, folder: Path, *words: str) -> str:
    """Standard output of a command of the checkout, started in ``folder``."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "l2r", *words]
    done = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed in {checkout}:\n{done.stderr}")
    return done.stdout


def losses(checkout: Path, folder: Path, recipe: str, steps: int) -> Numbers:
    """(kind, step, name) -> number of one run."""
    changes = [f"training.steps={steps}", "training.log_every=1", "evaluation.every=0"]
    command(checkout, folder, "train", recipe, *changes, "--out", "run")
    records = map(json.loads, (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines())
    return {(r["kind"], r["step"], n): r[n] for r in records for n in NUMBERS if n in r}


def diagnosis(checkout: Path, folder: Path, demo: str) -> Numbers:
    """Every number of the diagnoses that compare and diagnose make of one short run."""
    command(checkout, folder, "compare", demo, *SHORT, "--routers", "l2r_sips", "--out", "runs")
    sizes = ("--instances", "32", "--length", "64", "--sample", "128", "--certify", "4")
    command(checkout, folder, "diagnose", "runs/l2r_sips", "--gain", "8", *sizes)
    return {
        (made, *key): value
        for made, where in (("compare", "runs"), ("diagnose", "diagnosis"))
        for key, value in of_folder(folder / where / "l2r_sips").items()
    }


def of_folder(folder: Path) -> Numbers:
    """Numbers of diagnosis.json and checksums of the arrays beside it."""
    text = json.loads((folder / "diagnosis.json").read_text("utf-8"))
    found = dict(flat(text))
    arrays = dict(load_file(folder / "diagnosis.safetensors"))
    for file in folder.glob("*.npz"):
        with np.load(file) as stored:
            arrays |= {f"{file.name}/{name}": stored[name] for name in stored.files}
    for name, array in arrays.items():
        found["checksum", name] = zlib.crc32(np.ascontiguousarray(array).tobytes())
    return found


def study(checkout: Path, folder: Path) -> Numbers:
    """Measures of every run of a small plan, and its verdicts."""
    (folder / "two-arms.yaml").write_text(PLAN, "utf-8")
    places = ("--results", "results", "--out", "runs", "--processes", "1")
    table = json.loads(command(checkout, folder, "evidence", "two-arms.yaml", "--json", *places))
    found = {("table", *key): value for key, value in flat(table)}
    for result in stored_results(folder / "results"):
        for part in ("trained", "untrained", "curve"):
            for key, value in flat(result[part]):
                found[result["arm"], result["seed"], part, *key] = value
    return found


def stored_results(folder: Path) -> Iterator[dict[str, Any]]:
    """Results of cells, a line each; the lines between them are their recipes."""
    for file in folder.rglob("results.jsonl"):
        lines = map(json.loads, file.read_text("utf-8").splitlines())
        yield from (line for line in lines if "arm" in line)


def verdict(checkout: Path, folder: Path) -> Numbers:
    """The table of the committed study."""
    words = ("evidence", "decision", "--judge-only", "--json", "--out", str(folder / "runs"))
    return dict(flat(json.loads(command(checkout, checkout, *words))))


def flat(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every number and word of nested lists and objects, by its path."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(part, (*at, key))
    else:
        yield at, value


def compare(name: str, numbers: Callable[[Path, Path], Numbers], trees: tuple[Path, Path]) -> bool:
    """Print a line; whether every number that both trees report is the same."""
    found = []
    for tree in trees:
        with tempfile.TemporaryDirectory() as folder:
            found.append(numbers(tree, Path(folder)))
    old, new = found
    both = [key for key in old if key in new]
    different = [key for key in both if old[key] != new[key]]
    words = f"{len(both)} values"
    if len(both) < max(len(old), len(new)):
        words += f" of {len(old)} and {len(new)}"
    if different:
        key = different[0]
        words = f"{len(different)} of {words} differ; first {key}: {old[key]!r}, {new[key]!r}"
    print(f"{name:24} {words if different else words + ' identical'}", flush=True)
    return bool(both) and not different


def main() -> int:
    """Compare, print a line per recipe, diagnosis, study and verdict."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", action="append", help="a recipe for losses; may be repeated")
    parser.add_argument("--parts", default="losses,diagnosis,study,verdict")
    options = parser.parse_args()
    parts, trees = options.parts.split(","), (options.before.resolve(), options.after.resolve())
    jobs: dict[str, Callable[[Path, Path], Numbers]] = {}
    for recipe in options.only or RECIPES:
        jobs[f"losses {recipe}"] = partial(losses, recipe=recipe, steps=options.steps)
    for demo in DIAGNOSED:
        jobs[f"diagnosis {demo}"] = partial(diagnosis, demo=demo)
    jobs |= {"study": study, "verdict": verdict}
    wanted = {name: job for name, job in jobs.items() if name.split()[0] in parts}
    same = [compare(name, job, trees) for name, job in wanted.items()]
    return int(not same or not all(same))


if __name__ == "__main__":
    sys.exit(main())
