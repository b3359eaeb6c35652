"""Swap the routers of a checkpoint that is larger than the memory of the process, and export it.

    python -m scripts.proofs.large_swap --gigabytes 8 --limit 2 --work FOLDER

Writes an OLMoE of OLMoE-1B-7B's sizes with fewer layers and random bfloat16 weights, in shards of
500 MB, then runs `l2r swap`, and `l2r export` of the result, in a control group of `--limit` GB
(Linux, as root, cgroup v1 or v2). Prints seconds, the peak of anonymous memory, and the most that
the group held with its file cache. Exit code 1 where a command fails, takes the largest shard and
1 GB more of anonymous memory, or changes a tensor: the swap one that is not a router's, the export
any.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import OlmoeConfig, OlmoeForCausalLM

from l2r.runs.reading import read_json

_SHARD = "500MB"
_SIZES = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
_OF_A_LAYER = 64 * 3 * 2048 * 1024 * 2  # bytes in bfloat16, of the experts alone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--limit", type=float, default=2, help="GB for the process and its cache")
    parser.add_argument("--work", type=Path, required=True, help="needs three times --gigabytes")
    given = parser.parse_args()
    old, swapped, exported = (given.work / n for n in ("checkpoint", "swapped", "exported"))
    if not old.exists():
        write_checkpoint(old, given.gigabytes)
    for folder in (swapped, exported):
        shutil.rmtree(folder, ignore_errors=True)
    limit = int(given.limit * 1e9)
    swap = ["swap", str(old), "rank=8", "heads=4", "--out", str(swapped)]
    if not fits(swap, old, limit) or changed(old, swapped, but=".mlp.gate."):
        return 1
    export = ["export", str(swapped), "--out", str(exported)]
    return int(not fits(export, swapped, limit) or changed(swapped, exported))


def fits(arguments: list[str], checkpoint: Path, limit: int) -> bool:
    """Run the command under a limit of bytes and print what it took; whether it kept the bound."""
    sizes = [file.stat().st_size for file in checkpoint.glob("*.safetensors")]
    code, seconds, peak, held = limited([sys.executable, "-m", "l2r", *arguments], limit)
    print(f"{arguments[0]}: {sum(sizes) / 1e9:.1f} GB under {limit / 1e9:g} GB: exit code {code}")
    print(f"{seconds:.0f} s, anonymous memory at most {peak / 1e9:.2f} GB, ", end="")
    print(f"with file cache {held / 1e9:.2f} GB", flush=True)
    return code == 0 and peak < max(sizes) + 1e9


def changed(before: Path, after: Path, but: str | None = None) -> int:
    """Count tensors that differ between two folders, without those whose names contain ``but``."""
    old, new = Tensors(before), Tensors(after)
    names = [name for name in old.files if but is None or but not in name]
    count = sum(not torch.equal(old[name], new[name]) for name in names)
    print(f"{len(names)} tensors compared, {count} of them changed", flush=True)
    return count


def write_checkpoint(folder: Path, gigabytes: float) -> None:
    """Random weights, drawn and written whole: this part is not under the limit."""
    layers = max(1, round(gigabytes * 1e9 / _OF_A_LAYER))
    config = OlmoeConfig(**_SIZES, num_hidden_layers=layers, pad_token_id=1)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        OlmoeForCausalLM(config).save_pretrained(folder, max_shard_size=_SHARD)
    finally:
        torch.set_default_dtype(dtype)


def limited(command: list[str], limit: int) -> tuple[int, float, int, int]:
    """Exit code, seconds, peak of anonymous memory and of all memory of a command's group."""
    old = Path("/sys/fs/cgroup/memory")
    group = (old if old.is_dir() else old.parent) / "l2r-large-swap"
    names = ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
    bound, most = names if old.is_dir() else ("memory.max", "memory.peak")
    group.mkdir(exist_ok=True)
    (group / bound).write_text(str(limit))
    join = f"echo $$ > {group}/cgroup.procs && exec " + '"$@"'
    start, peak = time.monotonic(), 0
    running = subprocess.Popen(["sh", "-c", join, "sh", *command])
    while running.poll() is None:
        peak = max(peak, anonymous(running.pid))
        time.sleep(0.05)
    held = int((group / most).read_text())
    seconds = time.monotonic() - start
    group.rmdir()
    return running.returncode, seconds, peak, held


def anonymous(process: int) -> int:
    """Bytes of a process that are not of files."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Tensors:
    """Tensors of a folder's shards by name, read one at a time."""

    def __init__(self, folder: Path) -> None:
        index = read_json(folder / "model.safetensors.index.json")
        self.files = {name: folder / file for name, file in index["weight_map"].items()}

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(os.fspath(self.files[name]), "pt") as shard:
            tensor: Tensor = shard.get_tensor(name)
        return tensor


if __name__ == "__main__":
    raise SystemExit(main())
