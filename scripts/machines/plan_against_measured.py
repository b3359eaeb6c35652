"""Planned against measured peak memory: real training steps on a CPU, each in its own processes.

    python -m scripts.machines.plan_against_measured --out results/plan

Every run trains two steps of a recipe in our own loop, forward to optimizer; torch's profiler
adds up what its allocator hands out and takes back, the count that a GPU's
``max_memory_allocated`` gives. Beside it stand the simulation and the formula of l2r_lab.planning.
Writes memory.json and memory.md.
"""

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory import traced_peak
from l2r.report.tables import Table
from l2r_lab.planning.cut import StepCut
from l2r_lab.planning.formula import formula
from l2r_lab.planning.simulate import simulate
from l2r_lab.planning.sizes import read_sizes
from l2r_lab.training.loop import train
from l2r_lab.training.recipes.load import AnyRecipe, load_recipe

# recipe, form, ranks, changes
RUNS: list[tuple[str, str, int, list[str]]] = [
    ("demo/l2r-sips", "ddp", 1, []),
    ("demo/l2r-sips", "ddp", 1, ["training.micro_batch=4"]),
    ("demo/linear", "ddp", 1, ["training.micro_batch=8", "training.activation_checkpointing=true"]),
    ("demo/xmoe", "ddp", 1, ["training.micro_batch=8", "model.hidden_size=256"]),
    ("small/cpu-l2r-sips", "ddp", 1, ["training.micro_batch=2", "training.global_batch=2"]),
    (
        "demo/l2r-sips",
        "ddp",
        1,
        ["training.micro_batch=1", "training.global_batch=1", "training.precision=bf16"],
    ),
    ("demo-vision/l2r-sips", "ddp", 1, []),
    ("demo/l2r-sips", "ddp", 2, ["training.micro_batch=4", "training.global_batch=8"]),
    ("demo/l2r-sips", "fsdp2", 2, ["training.micro_batch=4", "training.global_batch=8"]),
    (
        "small/cpu-l2r-sips",
        "fsdp2",
        2,
        ["training.micro_batch=1", "training.global_batch=4"],
    ),
]
_STEPS = 2


class DoneError(Exception):
    """Ends a run before it exports its weights."""


def allocated(recipe: AnyRecipe) -> int:
    """Train this rank's first steps; the most bytes that torch's allocator had out at once."""

    def stop(step: int) -> None:
        if step == _STEPS:
            raise DoneError

    def first_steps() -> None:
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(DoneError):
            train(recipe, folder, show_progress=False, on_step=stop)

    return traced_peak(first_steps)  # one training a process: ranks meet once


def measure(recipe: str, ranks: int, changes: list[str]) -> int:
    """Peak of the fullest rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "scripts.machines.plan_against_measured",
        "--worker",
        recipe,
        *changes,
    ]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if ranks > 1:
        common |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    peaks = []
    for process in processes:
        out, error = process.communicate()
        lines = [line for line in out.splitlines() if line.startswith("peak ")]
        if not lines:
            raise SystemExit(f"{recipe} {changes}: {error}")
        peaks.append(int(lines[-1].split()[1]))
    return max(peaks)


def compare(recipe: str, parallel: str, ranks: int, changes: list[str]) -> dict[str, object]:
    """Measured, simulated and by formula, in bytes, and the errors in per cent."""
    changes = [*changes, f"training.parallel={parallel}", "training.steps=9"]
    loaded = load_recipe(recipe, changes)
    training = loaded.training
    cut = StepCut(
        parallel,
        ranks,
        training.global_batch,
        training.micro_batch,
        training.activation_checkpointing,
    )
    measured = measure(recipe, ranks, changes)
    simulated, estimated = simulate(loaded, cut).peak, formula(read_sizes(loaded), cut).peak
    return {
        "recipe": recipe,
        "form": f"{parallel}, {ranks} ranks" if ranks > 1 else "one process",
        "micro_batch": cut.micro_batch,
        "parts": cut.parts,
        "precision": training.precision,
        "checkpointing": cut.checkpointing,
        "measured": measured,
        "simulated": simulated,
        "formula": estimated,
        "simulation_error": 100 * (simulated / measured - 1),
        "formula_error": 100 * (estimated / measured - 1),
    }


def check_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Planned against measured peak memory, the worst errors in the caption."""
    columns = (
        "run", "form", "micro_batch x parts", "precision", "checkpointing", "measured MB",
        "simulated MB", "error (%)", "formula MB", "error of it (%)",
    )  # fmt: skip
    rows = tuple(
        (
            r["recipe"],
            r["form"],
            f"{r['micro_batch']} x {r['parts']}",
            r["precision"],
            r["checkpointing"],
            *(r["measured"] / 1e6, r["simulated"] / 1e6, r["simulation_error"]),
            *(r["formula"] / 1e6, r["formula_error"]),
        )
        for r in records
    )
    worst = {kind: max(records, key=lambda r: abs(r[f"{kind}_error"])) for kind in _KINDS}
    caption = "Worst error: " + "; ".join(
        f"{kind} {worst[kind][f'{kind}_error']:+.1f}% ({worst[kind]['recipe']}, "
        f"{worst[kind]['form']}, {worst[kind]['precision']})"
        for kind in _KINDS
    )
    return Table("Planned against measured", columns, rows, caption=f"{caption}.", digits=1)


_KINDS = ("simulation", "formula")


def main() -> None:
    """Run all, print a line each, save the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--only", type=int, nargs="*", help="positions in the list of runs")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.worker:
        peak = allocated(load_recipe(given.worker[0], given.worker[1:]))
        print(f"peak {peak}", flush=True)
        return
    records = []
    for run in [RUNS[n] for n in given.only] if given.only else RUNS:
        records.append(compare(*run))
        print(records[-1], flush=True)
    table = check_table(records)
    print(table.to_markdown() + table.caption)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "memory.json").write_text(json.dumps(records, indent=1) + "\n")
        (given.out / "memory.md").write_text(f"{table.to_markdown()}\n{table.caption}\n")


if __name__ == "__main__":
    main()
