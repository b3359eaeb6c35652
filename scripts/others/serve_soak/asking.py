"""Requests to a server: good ones whose answers are known, bad ones, and clients that leave."""

import contextlib
import http.client
import itertools
import json
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.engines.serve import bad_requests

Request = tuple[str, str, bytes, dict[str, str]]  # method, path, body, headers
MOST_REQUESTS, BAD_ONE_IN, HALF_OPEN, STALLED = 1_000_000, 5, 20, 10
ATTACK_SECONDS = 20  # from one looping chat and ten stalled streams to the next
LOOP = "for ever"  # the message for which the tiny model's chat template never ends
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: local"
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


@dataclass
class Counts:
    """The numbers of one soak; ``seconds`` are of good requests."""

    good: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    changed: int = 0
    bad: Counter[int] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    left: int = 0
    half_open: int = 0
    loops: Counter[int] = field(default_factory=Counter)
    stalled: int = 0
    seconds: list[float] = field(default_factory=list)
    turn: int = 0  # of the bad requests

    @property
    def requests(self) -> int:
        """All that were sent."""
        return self.good + sum(self.bad.values()) + self.left


def run_clients(
    port: int, counts: Counts, *, seconds: float, clients: int, alive: Callable[[], bool]
) -> None:
    """Ask from many threads for a time while the server is alive, and add to ``counts``."""
    lock = threading.Lock()
    good = [(request, text_of(request, *ask(port, request))) for request in good_requests()]
    bad = bad_requests.requests("served")
    begin = time.monotonic()

    def over() -> bool:
        return time.monotonic() > begin + seconds or counts.requests > MOST_REQUESTS

    def client(number: int) -> None:
        turns = itertools.islice(itertools.cycle(good), number, None)
        for turn in itertools.count(number):
            if over():
                return
            if turn % BAD_ONE_IN:
                ask_good(port, *next(turns), counts, lock)
            elif turn % (7 * BAD_ONE_IN) == 0:
                begun = leave(port, stream=turn % (14 * BAD_ONE_IN) == 0)
                with lock:
                    counts.left += begun
                    counts.lost["a stream did not begin"] += not begun
            else:
                with lock:
                    request = bad[counts.turn % len(bad)]
                    counts.turn += 1
                ask_bad(port, request, counts, lock)

    def half_open() -> None:
        while not over():
            counts.half_open += half_open_connections(port, HALF_OPEN)

    def attack() -> None:
        while not over():
            chat = {"messages": [{"role": "user", "content": LOOP}]}
            kind = {"Content-Type": "application/json"}
            with stalled_streams(port) as opened:
                counts.stalled += opened
                loop = ("POST", "/v1/chat/completions", json.dumps(chat).encode(), kind)
                counts.loops[ask(port, loop)[0]] += 1
                time.sleep(min(ATTACK_SECONDS, max(0, begin + seconds - time.monotonic())))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
    threads += [threading.Thread(target=half_open), threading.Thread(target=attack)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and alive():
        time.sleep(0.1)
    for thread in threads:
        thread.join()


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


def leave(port: int, *, stream: bool) -> bool:
    """Ask for a long answer and go: after the first bytes of a stream, or before any.

    Returns whether the answer was there, or on its way.
    """
    body = json.dumps({"prompt": "Long", "max_tokens": 200, "stream": stream}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
        connection.sendall(head.encode() + body)
        if stream:
            return connection.recv(512).startswith(b"HTTP/1.1 200 ")
        time.sleep(0.5)
        return True


@contextlib.contextmanager
def stalled_streams(port: int) -> Iterator[int]:
    """Ask for long streams and take none of them while the block runs: their number."""
    body = json.dumps({"prompt": "Long", "max_tokens": 400, "stream": True, "logprobs": 5}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with contextlib.ExitStack() as stack:
        for _ in range(STALLED):
            stalled = stack.enter_context(socket.socket())
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**11)
            stalled.connect(("127.0.0.1", port))
            stalled.sendall(head.encode() + body)
        yield STALLED


def half_open_connections(port: int, number: int) -> int:
    """Open connections without a whole request; return how many of them the server closes."""
    closed = 0
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        for turn in range(number):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            with contextlib.suppress(OSError):  # refused already
                half.sendall(HALF[: turn % 2 * len(HALF)])
            selector.register(half, selectors.EVENT_READ)
        while selector.get_map():
            events = selector.select(timeout=60)
            if not events:
                break  # they stay
            for key, _ in events:
                assert isinstance(key.fileobj, socket.socket)
                selector.unregister(key.fileobj)
                closed += 1
    return closed
