"""Plan every packaged recipe: hours, memory, and how soon `l2r plan` prints its first line.

    python scripts/machines/recipe_plans.py --out results/plan/recipes.md [--only vit-s/linear]

Hours and memory are by formula, on the paper's GPUs, else on one H100. Seconds are CPU time of a
process of its own until its first line: a busy machine would change those of the wall. A recipe
whose images are not here is named and left out.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from l2r.cli.console import print_table
from l2r.errors import InputError
from l2r.files.atomic import write_text
from l2r.report.tables import Table
from l2r_lab.planning import Assumptions, find_gpu, make_plan, plan_records
from l2r_lab.training import with_pixels
from l2r_lab.training.recipes import load_recipe, recipe_names

GPUS = {"olmoe-1b-7b": (8, "b200"), "vit-s": (4, "a100")}


def planned(name: str) -> tuple[Any, ...]:
    """Row of a recipe."""
    gpus, gpu = GPUS.get(name.partition("/")[0], (1, "h100"))
    recipe = with_pixels(load_recipe(name))
    plan = make_plan(recipe, gpus, Assumptions(find_gpu(gpu)), scale=(gpus,), simulated=False)
    best = plan_records(plan, recipe, None)["best"]
    form = (best["parallel"], best["micro_batch"])
    waited = seconds_until_first_line(name)
    return name, f"{gpus} {gpu.upper()}", *form, best["formula"] / 1e9, best["hours"], waited


def seconds_until_first_line(name: str) -> float:
    """CPU time of `l2r plan` until it prints, on Linux."""
    line = [sys.executable, "-m", "l2r", "plan", name]
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        said = process.stderr.readline().decode()
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        process.kill()
    if not said.startswith(name):
        raise SystemExit(f"l2r plan {name} failed: {said}")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Plan, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="a recipe; may be repeated")
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args()
    rows = []
    for name in options.only or recipe_names():
        try:
            rows.append(planned(name))
        except InputError as error:
            print(f"{name}: {error}", file=sys.stderr)
    columns = ("recipe", "GPUs", "form", "micro_batch", "GB per GPU", "hours", "first line after s")
    table = Table("Plans of the recipes", columns, tuple(rows), digits=2)
    print_table(table)
    if options.out:
        said = "`python scripts/machines/recipe_plans.py`: by formula, seconds of CPU time."
        write_text(options.out, f"{said}\n\n{table.to_markdown()}")


if __name__ == "__main__":
    main()
