"""What vLLM samples, replayed in transformers: ``python scripts/others/vllm_routes``.

In an environment as ``make serve-test`` makes it. Trains small/cpu-l2r-sips for some steps, or
takes ``--folder``, a checkpoint of ours or a swapped one; samples in vLLM in float32 and bfloat16,
with its routes recorded; and reads the same tokens in transformers in float32, with its own routes
and with vLLM's. Prints a Markdown table; ``--json`` writes its numbers. Recording of batches, cut
prompts and cached prefixes must agree with that of one sequence at a time, and on a GPU with
vLLM's own flag; exits with 1 where float32 does not.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from l2r import record, replay
from l2r.hf.checkpoints import load_causal_lm
from l2r.hf.routes import Routes, from_vllm
from l2r.hf.routes.layers import fingerprint_of

HERE = Path(__file__).parent
PAGES = ("data", "engines", "evidence", "inspect", "serving", "swap")  # of our documentation
SHORT = (
    "data.vocab_size=512",
    "data.sequence_length=128",
    "optimizer.lr=0.003",
    "optimizer.warmup=20480",
    "evaluation.max_batches=2",
)
HEAD = (
    "vLLM in",
    "decisions with another set",
    "tokens that differ in some layer",
    "largest change of a log-probability, own / replayed",
    "mean, own / replayed",
    "KL, own / replayed",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/others/vllm_routes", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/vllm-routes"))
    parser.add_argument("--folder", type=Path, help="a checkpoint, in place of a new one")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--json", type=Path, help="file for the numbers of the table")
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    folder = options.folder or trained(out, options.steps)
    model, tokenizer = load_causal_lm(folder)
    prompts = prompts_of(tokenizer, options.prompts)
    hows = ["many", "one"] + ["flag"] * torch.cuda.is_available()
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}", flush=True)
    lines, rows, failed = [], [], 0
    for dtype in ("float32", "bfloat16"):
        found = {how: in_vllm(folder, dtype, how, prompts, out) for how in hows}
        routes = {how: read(found[how], model) for how in hows}
        rows.append(numbers(dtype, model, prompts, found["many"], routes["many"]))
        print(row(rows[-1]), flush=True)
        cached = int((found["many"]["cached"] > 0).sum())
        for how in hows[1:]:
            line, same = compared(found["many"], found[how], routes["many"], routes[how])
            lines.append(f"{dtype}: {cached} prompts had a cached prefix; against {how}: {line}")
            failed |= dtype == "float32" and not same
    print("\n" + "\n".join(lines))
    if options.json is not None:
        settings = {"steps": options.steps, "prompts": options.prompts}
        result = {"settings": settings, "rows": rows, "recordings": lines}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if "flag" not in hows:
        print("vLLM's own flag: not run, it wants a GPU")
    return int(failed)


def trained(out: Path, steps: int) -> Path:
    """A checkpoint that was trained on a few pages, exported."""
    (out / "text").mkdir(exist_ok=True)
    for name in PAGES:
        text = (HERE.parents[2] / "docs" / f"{name}.md").read_text()[:4000]
        (out / "text" / f"{name}.txt").write_text(text)
    changes = (f"data.corpus={out / 'text'}", f"training.steps={steps}", *SHORT)
    l2r("train", "small/cpu-l2r-sips", *changes, "--out", out / "run")
    if not (out / "hf").exists():
        l2r("export", out / "run", "--format", "hf", "--out", out / "hf")
    return out / "hf"


def l2r(*args: object) -> None:
    subprocess.run([sys.executable, "-m", "l2r", *map(str, args)], check=True)


def prompts_of(tokenizer: Any, count: int) -> list[list[int]]:
    """Texts of 30 to 77 tokens; every second begins as the one before, by 32 tokens."""
    texts = [(HERE.parents[2] / "docs" / f"{name}.md").read_text() for name in PAGES]
    tokens = [tokenizer(text)["input_ids"] for text in texts]
    prompts: list[list[int]] = []
    for number in range(count):
        source, start = tokens[number % len(tokens)], 100 * (number // len(tokens))
        prompt = source[start : start + 30 + 7 * number % 48]
        if number % 2 and len(prompts[-1]) >= 32:
            prompt = prompts[-1][:32] + prompt[:40]
        prompts.append(prompt)
    return prompts


def in_vllm(
    folder: Path, dtype: str, how: str, prompts: list[list[int]], out: Path
) -> dict[str, np.ndarray]:
    """Tokens, log-probabilities and experts of every prompt."""
    file = out / f"{dtype}-{how}.npz"
    done = subprocess.run(
        [sys.executable, HERE / "in_vllm.py", folder, dtype, how, file],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        check=False,
        env={"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **os.environ},
    )
    if done.returncode:
        raise RuntimeError(f"vLLM ended with {done.returncode}: {done.stderr[-3000:]}")
    with np.load(file) as arrays:
        return dict(arrays)


def read(found: dict[str, np.ndarray], model: Any) -> Routes:
    arrays = [found[f"experts_{n}"] for n in range(len(found["tokens"]))]
    return from_vllm(arrays, fingerprint_of(model))


def numbers(
    dtype: str,
    model: Any,
    prompts: list[list[int]],
    found: dict[str, np.ndarray],
    routes: Routes,
) -> dict[str, Any]:
    """What changes between vLLM and transformers; pairs are own routes and vLLM's replayed."""
    own: list[Routes] = []
    changes: tuple[list[Any], list[Any]] = ([], [])
    divergences: tuple[list[Any], list[Any]] = ([], [])
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt + found["tokens"][number].tolist()])
        theirs = torch.from_numpy(found["logprobs"][number]).double()
        with torch.no_grad():
            with record(model) as recorder:
                plain = model(ids).logits
            with replay(model, routes[number]):
                replayed = model(ids).logits
        own.append(recorder.routes())
        taken = torch.from_numpy(found["tokens"][number])[:, None]
        for place, logits in enumerate((plain, replayed)):
            ours = logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)[:, : theirs.shape[1]]
            changes[place].append((ours - theirs).gather(1, taken).abs())
            divergences[place].append((theirs.exp() * (theirs - ours)).nansum(-1))
    agreement = Routes.concatenate(own).agreement(routes)
    change, divergence = ([torch.cat(p) for p in both] for both in (changes, divergences))
    return {
        "dtype": dtype,
        "decisions": float(1 - agreement.layers.mean()),
        "tokens": 1 - agreement.tokens,
        "compared": agreement.compared,
        "largest": [c.max().item() for c in change],
        "mean": [c.mean().item() for c in change],
        "kl": [d.mean().item() for d in divergence],
    }


def row(found: dict[str, Any]) -> str:
    """A row of the table."""
    pairs = (
        " / ".join(f"{value:.2g}" for value in found[name]) for name in ("largest", "mean", "kl")
    )
    cells = [
        found["dtype"],
        f"{found['decisions']:.2%}",
        f"{found['tokens']:.1%} of {found['compared']}",
        *pairs,
    ]
    return f"| {' | '.join(cells)} |"


def compared(
    one: dict[str, np.ndarray], other: dict[str, np.ndarray], ours: Routes, theirs: Routes
) -> tuple[str, bool]:
    """Agreement of the routes of two runs, of sequences that drew the same tokens."""
    same = np.flatnonzero((one["tokens"] == other["tokens"]).all(axis=1)).tolist()
    if not same:
        return "no sequence drew the same tokens", False
    found = ours[same].agreement(theirs[same])
    line = f"{found.tokens:.2%} of {found.compared} tokens alike, of {len(same)} equal sequences"
    return line, found.tokens == 1


if __name__ == "__main__":
    sys.exit(main())
