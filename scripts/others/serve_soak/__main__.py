"""Many clients ask ``l2r serve`` for minutes, every kind of bad request among them.

    make serve-soak SECONDS=60
    python -m scripts.others.serve_soak --seconds 900 --clients 20

A server process is started for each of the two kinds of worker, on a random tiny model unless
``--checkpoint`` names another. Every client asks good questions, whole and streamed, whose greedy
answers are known from a first quiet pass; one request in five is the next of the bad ones
(tests/engines/serve/bad_requests.py) or a client that leaves in the middle of its answer. All
the time 20 more connections are half-open; 400 at once come at the end. Every 20 seconds come a
chat for which the template loops, and ten streams of which nothing is taken.

Claims, with exit code 1 where one fails: no good request is lost, every greedy answer is that of
the quiet pass, every bad request gets a 4xx, every looping chat a 503, memory of the last third of
the time after warm-up (a fifth of all) is at most 2% above that of the first, half-open connections
are closed or refused, /health is 200 afterwards, and an interrupt ends the process. Requests go to
127.0.0.1 alone; an hour and a million of them is the most.
"""

import argparse
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from scripts.others.serve_soak.asking import (
    BAD_ONE_IN,
    LOOP,
    ask,
    half_open_connections,
    run_clients,
)
from tests.engines.serve import bad_requests
from transformers import PreTrainedTokenizerFast

from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.report.tables import Table
from l2r.runs.atomic import write_text
from l2r.training.data.tokenizer import packaged_olmoe_tokenizer

MANY_HALF_OPEN = 400
MODES: dict[str, list[str]] = {"one by one": [], "continuous batching": ["--continuous-batching"]}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    f"{{% if messages[0].content == '{LOOP}' %}}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
)


def main() -> int:
    """Soak both kinds of worker and print the table; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=900, help="of each kind of worker")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, help="default: a random tiny model")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: both")
    parser.add_argument("--out", type=Path, help="also write the table as a Markdown page")
    options = parser.parse_args()
    if not 0 < options.seconds <= 3600 or not 1 <= options.clients <= 48:
        parser.error("--seconds must be in (0, 3600], --clients in [1, 48]")
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = options.checkpoint or tiny_checkpoint(Path(temporary))
        rows, failed = [], []
        for mode in options.mode or MODES:
            row, problems = soak(checkpoint, mode, options, Path(temporary) / "server.log")
            rows.append(row)
            failed += [f"{mode}: {problem}" for problem in problems]
    table = Table("Soak", tuple(rows[0]), tuple(tuple(row.values()) for row in rows), digits=2)
    verdict = "\n".join(f"- FAILED: {problem}" for problem in failed) or "Every claim held."
    head = (
        f"{options.seconds:g} seconds with each worker, {options.clients} clients, one request in "
        f"{BAD_ONE_IN} bad, of {len(bad_requests.requests('served'))} kinds in turn."
    )
    page = f"{head}\n\n{table.to_markdown()}\n{verdict}\n"
    print(page)
    if options.out is not None:
        write_text(options.out, page)
    return 1 if failed else 0


def tiny_checkpoint(folder: Path) -> Path:
    """A random model with our routers, OLMoE's tokenizer and a chat template."""
    torch.manual_seed(0)
    config = L2rOlmoeConfig(
        vocab_size=50280, hidden_size=64, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
        max_position_embeddings=512, initializer_range=0.5,
        router={"kind": "l2r_sips", "rank": 2, "heads": 4},
    )  # fmt: skip
    L2rOlmoeForCausalLM(config).save_pretrained(folder / "model")
    PreTrainedTokenizerFast(
        tokenizer_file=str(packaged_olmoe_tokenizer()),
        eos_token="<|endoftext|>",
        pad_token="<|padding|>",
        chat_template=TEMPLATE,
    ).save_pretrained(folder / "model")
    return folder / "model"


def soak(
    checkpoint: Path, mode: str, options: argparse.Namespace, log: Path
) -> tuple[dict[str, Any], list[str]]:
    """Start a server, ask it for minutes and end it: a row of the table, the claims that fail."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "l2r", "serve", str(checkpoint), "--name", "served"]
    listening = ["--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as err:
        process = subprocess.Popen(
            [*command, *listening, *MODES[mode]], stdout=subprocess.DEVNULL, stderr=err
        )
        try:
            wait_for(port, process)
            server = psutil.Process(process.pid)
            counts = run_clients(
                port,
                seconds=options.seconds,
                clients=options.clients,
                alive=lambda: process.poll() is None,
                memory=lambda: int(server.memory_info().rss),
            )
            refused, closed = half_open_connections(port, MANY_HALF_OPEN)
            health = ask(port, ("GET", "/health", b"", {}))[0]
            since = time.perf_counter()
            process.send_signal(signal.SIGINT)
            code = process.wait(timeout=60)
            ended = time.perf_counter() - since
        finally:
            process.kill()
            process.wait()
    first, last = thirds(counts.memory)
    row = {
        "worker": mode, "good": counts.good, "lost": sum(counts.lost.values()),
        "changed": counts.changed, "bad": sum(counts.bad.values()),
        "not 4xx": sum(counts.wrong.values()), "left": counts.left,
        "half-open": counts.half_open, "loops": sum(counts.loops.values()),
        "stalled": counts.stalled,
        "p50, s": quantile(counts.seconds, 50), "p99, s": quantile(counts.seconds, 99),
        "first third, MB": first / 1e6, "last third, MB": last / 1e6,
        "change, %": 100 * (last / first - 1), "end, s": ended,
    }  # fmt: skip
    claims = {
        f"good requests were lost: {dict(+counts.lost)}": not +counts.lost,
        "greedy answers changed": not counts.changed,
        f"bad requests got no 4xx: {dict(counts.wrong.most_common(5))}": not counts.wrong,
        f"chats whose template loops got {dict(counts.loops)}": (
            options.checkpoint is not None or set(counts.loops) == {503}
        ),
        "memory grew by more than 2%": last / first - 1 <= 0.02,  # what is reclaimed is no leak
        f"of {MANY_HALF_OPEN} half-open connections {refused} were refused, {closed} closed": (
            refused > 0 and closed == MANY_HALF_OPEN
        ),
        f"/health was {health} afterwards": health == 200,
        f"an interrupt ended it with {code}": code == 130,
        "nothing was asked": counts.good > 0 and bool(counts.bad),
        "its log has a traceback": "Traceback" not in log.read_text(),
    }
    return row, [problem for problem, held in claims.items() if not held]


def wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    """Return when the server answers. Raises RuntimeError when it ends instead."""
    while process.poll() is None:
        try:
            if ask(port, ("GET", "/health", b"", {}))[0] == 200:
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"l2r serve ended with {process.returncode}")


def thirds(memory: list[tuple[float, int]]) -> tuple[float, float]:
    """Mean bytes in the first and the last third of the time after a fifth of warm-up."""
    samples = memory[len(memory) // 5 :]
    third = max(1, len(samples) // 3)
    values = [used for _, used in samples]
    return statistics.fmean(values[:third]), statistics.fmean(values[-third:])


def quantile(seconds: list[float], percent: int) -> float:
    """A percentile, NaN of nothing."""
    return sorted(seconds)[len(seconds) * percent // 100] if seconds else float("nan")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
