"""Many clients ask ``l2r serve`` for minutes, every kind of bad request among them.

    python scripts/serve_soak.py --minutes 15 --clients 20

A server process is started for each of the two kinds of worker, on a random tiny model unless
``--checkpoint`` names another. Every client asks good questions, whole and streamed, whose greedy
answers are known from a first quiet pass; one request in five is the next of the bad ones
(tests/integrations/serve/bad_requests.py) or a client that leaves in the middle of its answer.

Claims, with exit code 1 where one fails: no good request is lost, every greedy answer is that of
the quiet pass, every bad request gets a 4xx, memory of the last third of the time after warm-up is
at most 2% above that of the first, /health is 200 afterwards, and an interrupt ends the process.
Requests go to 127.0.0.1 alone; an hour and a million of them is the most.
"""

import argparse
import http.client
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedTokenizerFast

from l2r.data.tokenizer import packaged_olmoe_tokenizer
from l2r.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.report.tables import Table
from l2r.runs.atomic import write_text

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the tests' list
from tests.integrations.serve import bad_requests

Request = tuple[str, str, bytes, dict[str, str]]  # method, path, body, headers
MOST_REQUESTS, BAD_ONE_IN = 1_000_000, 5
MODES: dict[str, list[str]] = {"one by one": [], "continuous batching": ["--continuous-batching"]}
TEXTS = [
    "The state of",
    "What is",
    "x = [",
    "1 + 1 =",
    "Once upon",
    "def f(",
    "Therefore",
    "In the",
]
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@dataclass
class Counts:
    """The numbers of one soak; ``seconds`` are of good requests, ``memory`` in bytes by time."""

    good: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    changed: int = 0
    bad: Counter[int] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    left: int = 0
    seconds: list[float] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    @property
    def requests(self) -> int:
        """All that were sent."""
        return self.good + sum(self.bad.values()) + self.left


def main() -> int:
    """Soak both kinds of worker and print the table; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15, help="of each kind of worker")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--checkpoint", type=Path, help="default: a random tiny model")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: both")
    parser.add_argument("--out", type=Path, help="also write the table as a Markdown page")
    options = parser.parse_args()
    if not 0 < options.minutes <= 60 or not 1 <= options.clients <= 48:
        parser.error("--minutes must be in (0, 60], --clients in [1, 48]")
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = options.checkpoint or tiny_checkpoint(Path(temporary))
        rows, failed = [], []
        for mode in options.mode or MODES:
            row, problems = soak(checkpoint, mode, options, Path(temporary) / "server.log")
            rows.append(row)
            failed += [f"{mode}: {problem}" for problem in problems]
    table = Table("Soak", tuple(rows[0]), tuple(tuple(row.values()) for row in rows), digits=2)
    verdict = "\n".join(f"- FAILED: {problem}" for problem in failed) or "Every claim held."
    page = (
        f"{options.minutes:g} minutes of each, {options.clients} clients, one request in "
        f"{BAD_ONE_IN} bad.\n\n{table.to_markdown()}\n{verdict}\n"
    )
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
            counts = run_clients(port, process, options)
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
        "p50, s": quantile(counts.seconds, 50), "p99, s": quantile(counts.seconds, 99),
        "first third, MB": first / 1e6, "last third, MB": last / 1e6,
        "change, %": 100 * (last / first - 1), "end, s": ended,
    }  # fmt: skip
    claims = {
        f"good requests were lost: {dict(counts.lost)}": not counts.lost,
        "greedy answers changed": not counts.changed,
        f"bad requests got no 4xx: {dict(counts.wrong.most_common(5))}": not counts.wrong,
        "memory grew by more than 2%": last <= 1.02 * first,
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


def run_clients(
    port: int, process: "subprocess.Popen[bytes]", options: argparse.Namespace
) -> Counts:
    """Ask from many threads until the time is over, and sample the server's memory."""
    counts, lock = Counts(), threading.Lock()
    good = [(request, text_of(request, *ask(port, request))) for request in good_requests()]
    bad = itertools.cycle(bad_requests.requests("served"))
    begin = time.monotonic()
    end = begin + 60 * options.minutes

    def client(number: int) -> None:
        turns = itertools.islice(itertools.cycle(good), number, None)
        for turn in itertools.count(number):
            if time.monotonic() > end or counts.requests > MOST_REQUESTS:
                return
            if turn % BAD_ONE_IN:
                ask_good(port, *next(turns), counts, lock)
            elif turn % (7 * BAD_ONE_IN) == 0:
                leave(port)
                with lock:
                    counts.left += 1
            else:
                with lock:
                    request = next(bad)
                ask_bad(port, request, counts, lock)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(options.clients)]
    for thread in threads:
        thread.start()
    server = psutil.Process(process.pid)
    while any(thread.is_alive() for thread in threads) and process.poll() is None:
        counts.memory.append((time.monotonic() - begin, server.memory_info().rss))
        time.sleep(min(1, 0.6 * options.minutes))
    for thread in threads:
        thread.join()
    return counts


def good_requests() -> list[Request]:
    """Completions and chats, whole and streamed, of different lengths."""
    requests: list[Request] = []
    kind = {"Content-Type": "application/json"}
    for number, text in enumerate(TEXTS):
        common = {"max_tokens": 4 + 4 * number, "temperature": 0, "stream": number % 2 == 1}
        chat = {"messages": [{"role": "user", "content": text}], **common}
        completion = {"prompt": text, "n": 1 + number % 3 // 2, **common}
        for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
            requests.append(("POST", path, json.dumps(body).encode(), kind))
    return requests


def ask(port: int, request: Request) -> tuple[int, bytes]:
    """Status and body of the answer."""
    method, path, body, headers = request
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request(method, path, body or None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def text_of(request: Request, status: int, body: bytes) -> str:
    """The text of every choice. Raises ValueError where the answer is not whole."""
    if status != 200:
        raise ValueError(f"status {status}")
    if not json.loads(request[2])["stream"]:
        answers = [json.loads(body)]
    else:
        events = body.decode().split("\n\n")
        if events[-2:] != ["data: [DONE]", ""]:
            raise ValueError("the stream broke off")
        answers = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    texts: Counter[int] = Counter()
    parts: dict[int, str] = {}
    for choice in (choice for answer in answers for choice in answer["choices"]):
        said = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get(
            "content", ""
        )
        parts[choice["index"]] = parts.get(choice["index"], "") + said
        texts[choice["index"]] += choice["finish_reason"] is not None
    if set(texts.values()) != {1}:
        raise ValueError("a choice has no end")
    return json.dumps(parts)


def ask_good(
    port: int, request: Request, expected: str, counts: Counts, lock: threading.Lock
) -> None:
    """Ask and compare."""
    since = time.perf_counter()
    try:
        text = text_of(request, *ask(port, request))
    except (OSError, http.client.HTTPException, ValueError) as error:
        with lock:
            counts.lost[repr(error)[:80]] += 1
        return
    with lock:
        counts.good += 1
        counts.changed += text != expected
        counts.seconds.append(time.perf_counter() - since)


def ask_bad(port: int, request: Request, counts: Counts, lock: threading.Lock) -> None:
    """Ask, and count what is not refused."""
    try:
        status = ask(port, request)[0]
    except (OSError, http.client.HTTPException) as error:
        status, problem = 0, repr(error)
    else:
        problem = "" if 400 <= status < 500 else str(status)
    with lock:
        counts.bad[status] += 1
        if problem:
            counts.wrong[f"{request[1]} {request[2][:60]!r}: {problem}"] += 1


def leave(port: int) -> None:
    """Ask for a long answer and go after its first bytes."""
    body = json.dumps({"prompt": "Long", "max_tokens": 400, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
        connection.sendall(head.encode() + body)
        connection.recv(512)


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
