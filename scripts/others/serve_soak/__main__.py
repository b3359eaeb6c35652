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
the quiet pass, every bad request gets a 4xx, every looping chat a 503, half-open connections are
closed, /health is 200 afterwards, an interrupt ends the process, and nothing is kept of
a request. The last is asked of the idle server (watched.py) after each third of the time, and the
second and third are compared with the first, in which caches fill. What Python keeps of a request
is at least one block of at most 512 bytes, or more than 512 bytes of malloc; so a request may leave
neither. Resident memory also has what malloc cannot give back between live blocks: of it the claim
is that the last third adds less than the second, or less than one part in a hundred.
Requests go to 127.0.0.1 alone; an hour and a million of them is the most.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from l2r.files.atomic import write_text
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.report.tables import Table
from l2r.text.tokenizer import packaged_olmoe_tokenizer
from scripts.others.serve_soak.asking import (
    BAD_ONE_IN,
    LOOP,
    Counts,
    ask,
    half_open_connections,
    run_clients,
)
from tests.engines.serve import bad_requests

MANY_HALF_OPEN = 400
WATCHED = Path(__file__).with_name("watched.py")
# Python's allocator takes what is no larger from its own pools, all else from malloc.
LARGEST_BLOCK = 512
SAMPLES, BETWEEN_SECONDS = 3, 3  # of an idle server; what is kept is in each
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
    memory = log.with_suffix(".jsonl")
    command = [sys.executable, str(WATCHED), str(memory), "serve", str(checkpoint)]
    listening = ["--name", "served", "--host", "127.0.0.1", "--port", str(port)]
    counts, thirds = Counts(), []
    with log.open("w") as err:
        process = subprocess.Popen(
            [*command, *listening, *MODES[mode]], stdout=subprocess.DEVNULL, stderr=err
        )
        try:
            wait_for(port, process)
            for _ in range(3):
                run_clients(
                    port,
                    counts,
                    seconds=options.seconds / 3,
                    clients=options.clients,
                    alive=lambda: process.poll() is None,
                )
                thirds.append({"requests": counts.requests, **kept(process, memory)})
            closed = half_open_connections(port, MANY_HALF_OPEN)
            health = ask(port, ("GET", "/health", b"", {}))[0]
            since = time.perf_counter()
            process.send_signal(signal.SIGINT)
            code = process.wait(timeout=60)
            ended = time.perf_counter() - since
        finally:
            process.kill()
            process.wait()
    first, second, third = thirds
    asked = third["requests"] - first["requests"]
    left = {key: (third[key] - first[key]) / asked for key in ("blocks", "bytes")}
    grown = [after["resident"] - before["resident"] for before, after in pairwise(thirds)]
    row = {
        "worker": mode, "good": counts.good, "lost": sum(counts.lost.values()),
        "changed": counts.changed, "bad": sum(counts.bad.values()),
        "not 4xx": sum(counts.wrong.values()), "left": counts.left,
        "half-open": counts.half_open, "loops": sum(counts.loops.values()),
        "stalled": counts.stalled,
        "p50, s": quantile(counts.seconds, 50), "p99, s": quantile(counts.seconds, 99),
        "blocks kept a request": left["blocks"], "bytes": left["bytes"],
        "resident, MB": " / ".join(f"{each['resident'] / 1e6:.1f}" for each in thirds),
        "end, s": ended,
    }  # fmt: skip
    claims = {
        f"good requests were lost: {dict(+counts.lost)}": not +counts.lost,
        "greedy answers changed": not counts.changed,
        f"bad requests got no 4xx: {dict(counts.wrong.most_common(5))}": not counts.wrong,
        f"chats whose template loops got {dict(counts.loops)}": (
            options.checkpoint is not None or set(counts.loops) == {503}
        ),
        f"a request leaves {left['blocks']:.2f} blocks of Python": left["blocks"] < 1,
        f"a request leaves {left['bytes']:.0f} bytes of malloc": left["bytes"] <= LARGEST_BLOCK,
        f"resident memory grew by {grown[0]}, then by {grown[1]} bytes": (
            grown[1] <= max(grown[0], second["resident"] / 100)
        ),
        f"of {MANY_HALF_OPEN} half-open connections {closed} were closed": (
            closed == MANY_HALF_OPEN
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


def kept(process: "subprocess.Popen[bytes]", file: Path) -> dict[str, int]:
    """What an idle server keeps: the least of some samples, by the fields of watched.py.

    Raises RuntimeError when it says nothing.
    """
    samples: list[dict[str, int]] = []
    for _ in range(SAMPLES):
        time.sleep(BETWEEN_SECONDS)
        before = len(lines(file))
        process.send_signal(signal.SIGUSR1)
        since = time.monotonic()
        while len(lines(file)) == before:
            if time.monotonic() > since + 60:
                raise RuntimeError("l2r serve said nothing of its memory for 60 seconds")
            time.sleep(0.1)
        samples.append(json.loads(lines(file)[-1]))
    return {key: min(sample[key] for sample in samples) for key in samples[0]}


def lines(file: Path) -> list[str]:
    """Whole lines of a file, which may not be there yet."""
    text = file.read_text() if file.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()


def quantile(seconds: list[float], percent: int) -> float:
    """A percentile, NaN of nothing."""
    return sorted(seconds)[len(seconds) * percent // 100] if seconds else float("nan")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
