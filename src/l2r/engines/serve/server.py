"""Start and stop a server: a checkpoint, a worker, the app, uvicorn and its connections."""

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import h11
import transformers
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from l2r.engines.serve.options import ServeLimits, ServeOptions, bound
from l2r.engines.serve.prompts import Prompts
from l2r.engines.serve.sequence import routes_of
from l2r.engines.serve.web_app import Served, build
from l2r.engines.serve.worker import OneByOne, Worker
from l2r.errors import InputError
from l2r.files.wording import named_path
from l2r.hf.checkpoints import (
    check_reads_text,
    checkpoint_folder,
    load_pretrained,
    load_tokenizer,
)
from l2r.routers.offload import device_of

_CPU_BLOCKS = 64  # of 256 tokens; transformers' own choice takes all memory and a minute to fill it
_SEND_BUFFER = 2**14  # bytes of an answer that wait for a client, here and in its socket


class Server(uvicorn.Server):
    """uvicorn, which ends the answers in the making when it is told to end."""

    def __init__(self, config: Any, worker: Worker) -> None:
        super().__init__(config)
        self.worker = worker

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.worker.close()
        await super().shutdown(sockets)


def serve_checkpoint(checkpoint: Path, options: ServeOptions) -> None:
    """Serve until interrupted.

    Raises ValueError for a checkpoint that cannot be loaded or has no tokenizer and for a host of
    elsewhere, OSError where the port cannot be had.
    """
    with _prepared(checkpoint, options) as (server, sockets):
        gc.freeze()  # walks over what is loaded take longer at the end than all else together
        server.run(sockets)


@contextmanager
def serving(checkpoint: Path, options: ServeOptions) -> Iterator[tuple[int, Worker]]:
    """Serve in a thread while the block runs: the port and the worker. Raises as ``serve``."""
    with _prepared(checkpoint, options) as (server, sockets):
        port = sockets[0].getsockname()[1]
        thread = threading.Thread(target=server.run, args=(sockets,), name="uvicorn")
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield port, server.worker
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def _prepared(
    checkpoint: Path, options: ServeOptions
) -> Iterator[tuple[Server, list[socket.socket]]]:
    check_reads_text(checkpoint)
    tokenizer = load_tokenizer(checkpoint, trust_remote_code=options.trust_remote_code)
    with ExitStack() as stack:
        # Before minutes of loading; nobody can connect until uvicorn listens.
        sockets = bound(options.host, options.port, stack)
        model = load_pretrained(
            checkpoint,
            trust_remote_code=options.trust_remote_code,
            **options.placement.options(checkpoint_folder(checkpoint)),
        )
        if not model.can_generate():
            raise InputError(
                f"serve needs a model that writes; {type(model).__name__} cannot generate"
            )
        model = options.placement.place(model.eval())
        ends = _ends(model, tokenizer)
        # What else the checkpoint's generation_config.json says, ``generate`` would follow.
        model.generation_config = transformers.GenerationConfig()
        worker = _worker(model, options)
        stack.callback(worker.close)
        limits = _fitting(options.limits, model, worker)
        ids = model.get_input_embeddings().num_embeddings
        prompts = Prompts(tokenizer, ids=ids, limits=limits)
        stack.callback(prompts.chats.close)
        served = Served(
            name=options.name or named_path(checkpoint).name,
            created=int(checkpoint_folder(checkpoint).stat().st_mtime),
            prompts=prompts,
            ends=ends,
            worker=worker,
            limits=limits,
            routes=routes_of(model),
        )
        config = uvicorn.Config(
            build(served, host=options.host, allowed=options.allowed_hosts),
            http=timed_connection(limits),
            ws="none",
            timeout_graceful_shutdown=1,
        )
        yield Server(config, worker), sockets


def _worker(model: Any, options: ServeOptions) -> Worker:
    stall = options.limits.stall_timeout
    if not options.continuous_batching:
        return OneByOne(model, stall_timeout=stall, unread=options.limits.max_unread)
    from l2r.engines.serve.batching import Batching

    on_cpu = device_of(model).type == "cpu"
    blocks = options.num_blocks or (_CPU_BLOCKS if on_cpu else None)
    return Batching(model, num_blocks=blocks, stall_timeout=stall)


def _fitting(limits: ServeLimits, model: Any, worker: Worker) -> ServeLimits:
    """Limits with the context that the model and the worker's cache have."""
    of_model = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return replace(limits, context=min(limits.context, of_model or 4096, worker.context))


def _ends(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer: the model's own, or else the tokenizer's."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        ends = tokenizer.eos_token_id
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def timed_connection(limits: ServeLimits) -> type[H11Protocol]:
    """Make uvicorn's connection close on slow clients, which no setting of uvicorn does.

    uvicorn waits for ever for the first header and for a client that reads nothing of an answer,
    and ``limit_concurrency`` counts connections only when a request arrives on one of them.
    """

    class TimedConnection(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            # Linux would hold megabytes, all of an answer, for a client that takes nothing of it.
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            transport.set_write_buffer_limits(_SEND_BUFFER)
            if len(self.connections) > limits.max_connections:
                transport.close()
            self._await_header()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._await_header()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._await_header()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._after(limits.write_timeout, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop()
            self._await_header()

        def send_400_response(self, msg: str) -> None:
            # After an answer uvicorn's own raises this, and any client could fill the log with it.
            with suppress(h11.LocalProtocolError):
                super().send_400_response(msg)
            self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _await_header(self) -> None:
            """Wait for the end of a header, unless an answer is being made or waits to be taken."""
            if self.flow.write_paused:
                return
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()
            elif self._timer is None:
                self._after(limits.header_timeout, self._expire)

        def _expire(self) -> None:
            self.transport.close()  # which first waits for the client to take the last answer
            self._after(limits.write_timeout, self.transport.abort)

        def _after(self, seconds: float, act: Callable[[], None]) -> None:
            self._stop()
            self._timer = self.loop.call_later(seconds, act)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return TimedConnection
