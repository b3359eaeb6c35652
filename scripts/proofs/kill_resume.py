"""Kill training with SIGKILL at random moments, resume it, and compare every bit of the end.

    python scripts/proofs/kill_resume.py --trials 20

One unbroken run is the reference. In each trial a process trains the same recipe and is killed
one to three times, each time at a moment drawn uniformly over the length of the unbroken run;
then it is left to finish. Weights, their moving average and all logged numbers must be those of
the unbroken run, byte for byte. Exit code 1 on any difference.

Processes are forked from one that has imported everything, so that moments fall into training,
validation, checkpoints and export and not into imports. Linux only.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from l2r.cli.console import print_table
from l2r.files.atomic import write_text
from l2r.files.folder import RunFolder
from l2r.hf.checkpoints import load_causal_lm  # imported once, before the forks
from l2r.machine import describe_machine
from l2r.report.tables import Table
from l2r_lab.training import language
from l2r_lab.training.loop import train
from l2r_lab.training.recipes.load import load_recipe

_WARM = (load_causal_lm, language)
RECIPE = "demo/l2r-sips"
CHANGES = [
    "router.query_norm=batchnorm",  # running statistics are state too
    "data.vocab_size=512",
    "data.characters_per_domain=100000",
    "data.sequence_length=64",
    "model.hidden_size=64",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.intermediate_size=32",
    "model.num_experts=8",
    "model.num_experts_per_tok=2",
    "training.steps=24",
    "training.global_batch=8",
    "training.micro_batch=4",
    "training.ema_decay=0.9",
    "training.log_every=1",
    "optimizer.warmup=2048",
    "evaluation.every=5",
    "evaluation.batch_size=4",
    "evaluation.max_batches=2",
    "checkpoint.every=3",
]


@dataclass(frozen=True)
class Trial:
    """Steps logged at each kill, kills that met a half-written checkpoint or export, verdict."""

    steps: tuple[int, ...]
    inside_writes: int
    differences: tuple[str, ...]


def main() -> int:
    """Run the trials and print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, help="also write the table as a Markdown page")
    options = parser.parse_args()
    if options.trials < 1:
        parser.error(f"--trials must be >= 1; got {options.trials}")
    moments = random.Random(options.seed)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        os.environ.setdefault("L2R_CACHE", str(root / "cache"))
        finish(root / "first")  # builds the corpus
        since = time.perf_counter()
        finish(root / "unbroken")
        length = time.perf_counter() - since
        print(f"one unbroken run: {length:.1f} s", file=sys.stderr, flush=True)
        trials = []
        for number in range(1, options.trials + 1):
            trials.append(run_trial(root / str(number), root / "unbroken", length, moments))
            print(f"trial {number}: {trials[-1]}", file=sys.stderr, flush=True)
    table = make_table(trials)
    print_table(table)
    failed = sum(bool(trial.differences) for trial in trials)
    kills = sum(len(trial.steps) for trial in trials)
    verdict = f"{len(trials) - failed} of {len(trials)} trials ({kills} kills) ended bit-identical"
    print(verdict)
    if options.out is not None:
        write_text(options.out, page(table, verdict, length, options))
    return 1 if failed else 0


def run_trial(folder: Path, unbroken: Path, length: float, moments: random.Random) -> Trial:
    """Kill one to three times, finish, compare."""
    steps: list[int] = []
    inside = 0
    kills = moments.randint(1, 3)
    while len(steps) < kills:
        process = start(folder)
        time.sleep(moments.random() * length)
        process.kill()
        process.join()
        if process.exitcode == -signal.SIGKILL:
            steps.append(len(RunFolder(folder).read_metrics("train")))
            inside += any(folder.rglob(".*.part"))
        elif process.exitcode:
            raise RuntimeError(f"training into {folder} ended with code {process.exitcode}")
        elif steps:
            break  # it was faster than the reference; nothing is left to kill
        else:
            shutil.rmtree(folder)
    finish(folder)
    return Trial(tuple(steps), inside, tuple(differences(unbroken, folder)))


def start(folder: Path) -> multiprocessing.process.BaseProcess:
    """A process of its own that trains into ``folder``."""
    process = multiprocessing.get_context("fork").Process(target=work, args=(folder,))
    process.start()
    return process


def finish(folder: Path) -> None:
    """Train to the end. Raises RuntimeError when the process fails."""
    process = start(folder)
    process.join()
    if process.exitcode or not is_done(RunFolder(folder)):
        raise RuntimeError(f"training into {folder} ended with code {process.exitcode}")


def work(folder: Path) -> None:
    """What the process does."""
    torch.set_num_threads(1)
    train(load_recipe(RECIPE, CHANGES), folder, show_progress=False)


def is_done(run: RunFolder) -> bool:
    """Whether the run has exported its weights and their average."""
    return all((f / "config.json").is_file() for f in (run.model, run.averaged_model))


def differences(one: Path, two: Path) -> list[str]:
    """Names of exported files that differ in a byte or are missing, and of logged numbers."""
    found = []
    for export in ("model", "model-ema"):
        names = {p.name for root in (one, two) for p in (root / export).iterdir()}
        for name in sorted(names):
            files = [root / export / name for root in (one, two)]
            if (
                not all(f.is_file() for f in files)
                or files[0].read_bytes() != files[1].read_bytes()
            ):
                found.append(f"{export}/{name}")
    if numbers(one) != numbers(two):
        found.append("metrics.jsonl")
    return found


def numbers(folder: Path) -> list[str]:
    """metrics.jsonl without the speed, which no two runs share."""
    records = RunFolder(folder).read_metrics()
    return [json.dumps({k: v for k, v in r.items() if k != "per_second"}) for r in records]


def make_table(trials: list[Trial]) -> Table:
    """A row per trial."""
    rows = tuple(
        (
            number,
            ", ".join(map(str, trial.steps)),
            trial.inside_writes,
            ", ".join(trial.differences) or "identical",
        )
        for number, trial in enumerate(trials, start=1)
    )
    columns = ("trial", "killed after step", "kills inside a write", "end")
    caption = "Inside a write: a half-written checkpoint or export lay in the folder at the kill."
    return Table("Killed by SIGKILL, resumed, compared", columns, rows, caption=caption)


def page(table: Table, verdict: str, length: float, options: argparse.Namespace) -> str:
    """The outcome as a page of the documentation."""
    machine = describe_machine()
    device = ", ".join(machine["gpus"]) or "CPU"
    versions = f"Python {machine['python']}, torch {machine['packages']['torch']}, {device}"
    text = "\n\n".join(" ".join(part.split()) for part in __doc__.split("\n\n")[2:])
    return (
        "# Evidence: a killed run ends with the same bits\n\n"
        "`python scripts/proofs/kill_resume.py "
        f"--trials {options.trials} --seed {options.seed}`\n\n"
        f"{text}\n\n"
        f"**{verdict}.** One unbroken run took {length:.1f} s; {versions}.\n\n"
        f"Recipe: `{RECIPE} {' '.join(CHANGES)}`\n\n{table.to_markdown()}\n{table.caption}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
