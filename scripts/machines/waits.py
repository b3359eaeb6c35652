"""Processor time of the commands that people wait for, beside the import that each of them needs.

    python -m scripts.machines.waits RUN --rounds 5

RUN is a run of ``l2r compare demo training.steps=30 --routers linear``: runs/demo/linear. Each
round starts every command once, in turns with ``from transformers import OlmoeForCausalLM``; a
number is the median over rounds of what a command takes above the import of its round, user and
system, with one thread. Time by the clock would be that of whatever else the machine does.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from l2r.hf.checkpoints import load_tokenizer

LOOK = Path("examples/look")
TEXT = "She took the old road to the sea."
IMPORT = ["-c", "from transformers import OlmoeForCausalLM"]


def save_mixtral(folder: Path) -> Path:
    """Save a tiny stock Mixtral with the tokenizer of examples/look."""
    tokenizer = load_tokenizer(LOOK)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(vocab_size=len(tokenizer), num_local_experts=8, **sizes, **heads)
    MixtralForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def commands_of(run: Path, mixtral: Path, out: Path) -> dict[str, list[str]]:
    """Arguments of Python for each command, by its name."""
    l2r, written = ["-m", "l2r"], ["--out", str(out)]
    commands = {"l2r diagnose RUN": [*l2r, "diagnose", str(run), *written]}
    for name, folder in (("examples/look", LOOK), ("a tiny Mixtral", mixtral)):
        commands[f"l2r diagnose --text, {name}"] = [
            *l2r, "diagnose", str(folder), "--text", TEXT, *written,
        ]  # fmt: skip
        commands[f"l2r check, {name}"] = [*l2r, "check", str(folder)]
    return commands


def processor_seconds(arguments: list[str]) -> float:
    """Processor time, user and system, of Python with these arguments and of its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, *arguments]
    ended = subprocess.run(line, env=environment, capture_output=True, check=False)
    if ended.returncode not in (0, 1):  # check says 1 where it finds something
        raise SystemExit(f"{arguments}: {ended.stderr.decode()[-500:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print a table: the import, then what each command takes above it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    imports, above = list[float](), dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as folder:
        mixtral = save_mixtral(Path(folder) / "mixtral")
        commands = commands_of(given.run, mixtral, Path(folder) / "out")
        for _ in range(given.rounds):
            imports.append(processor_seconds(IMPORT))
            for name, arguments in commands.items():
                took = processor_seconds(arguments) - imports[-1]
                above.setdefault(name, []).append(took)
    print(f"| the import alone | {statistics.median(imports):.1f} s |")
    for name, seconds in above.items():
        print(f"| {name} | + {statistics.median(seconds):.1f} s |")


if __name__ == "__main__":
    main()
