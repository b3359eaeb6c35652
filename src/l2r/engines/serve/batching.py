"""Answers that share forward passes and a key-value cache: transformers' continuous batching."""

import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessor,
    ContinuousBatchingLogitsProcessorList,
)
from transformers.generation.continuous_batching.model_runner import (
    infer_max_single_request_tokens,
)

from l2r.engines.serve.sequence import RoutedTokens, Sequence, noting
from l2r.engines.serve.worker import NOT_RUNNING, STOPPING, Worker, log, only
from l2r.hf.routes import RouterChoices
from l2r.routers.offload import device_of

_POLL_SECONDS = 0.1
_CPU_TOKENS = 1024  # in a step; transformers' own 8,192 make a mask of most of a gigabyte


class Batching(Worker):
    """Worker for many sequences at a time; it replaces a loop of transformers that died.

    ``context`` is the number of tokens that the cache has for one sequence: a longer one would end
    transformers' loop, and must not be submitted.
    """

    def __init__(
        self, model: Any, *, num_blocks: int | None = None, stall_timeout: float = 120
    ) -> None:
        super().__init__(stall_timeout)
        self._model, self._num_blocks = model, num_blocks
        self._sequences: dict[str, Sequence] = {}
        self._closing = threading.Event()
        self._manager = self._start()
        self.context = int(infer_max_single_request_tokens(self._manager.batch_processor.cache))
        self._watch = threading.Thread(target=self._run, name="batching-watch", daemon=True)
        self._watch.start()

    def submit(self, sequence: Sequence) -> None:
        if not self._sequences:
            self._moved()
        self._sequences[sequence.name] = sequence
        accepted = self._manager.add_request(
            sequence.prompt,
            request_id=sequence.name,
            # Never reached, nor is the end token: the sequence says when it is over.
            max_new_tokens=sequence.sampling.max_tokens + 2,
            eos_token_id=-1,
        )
        if accepted is None:
            self._drop(sequence.name, STOPPING if self._closing.is_set() else NOT_RUNNING)

    def cancel(self, sequence: Sequence) -> None:
        sequence.cancel()
        if self._sequences.pop(sequence.name, None) is not None:
            self._manager.cancel_request(sequence.name)

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._watch.join(timeout=5)
        self._drop_all(STOPPING)
        self._manager.stop(block=True, timeout=5, hard_stop=True)

    def _alive(self) -> bool:
        return self._manager.is_running() and not self._closing.is_set()

    def _busy(self) -> bool:
        return bool(self._sequences)

    def _start(self) -> Any:
        manager = self._model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=self._num_blocks,
                max_batch_tokens=_CPU_TOKENS if device_of(self._model).type == "cpu" else None,
                use_cuda_graph=False,  # a graph cannot hold the choice of tokens, nor a loop
                use_async_batching=False,  # that is a step ahead of it
            ),
        )
        steps = LogitsProcessorList([_Steps(self._step, self._moved)])
        self._taken = _Taken(self._model, self._sequences)
        manager.logit_processor = _Processors(steps, self._taken)
        manager.logit_processor.tensors_required = 1
        manager.warmup()  # makes the cache
        self._read_whole_prompts(manager.batch_processor.cache)
        manager.start()
        return manager

    def _read_whole_prompts(self, cache: Any) -> None:
        """Forward a prompt whole if its experts are asked for, even if another began as it does."""
        shared = cache.search_prefix_match

        def search(name: str, prompt: list[int]) -> int:
            sequence = self._sequences.get(name)
            return 0 if sequence is not None and sequence.routed else shared(name, prompt)

        cache.search_prefix_match = search

    def _step(self, name: str, logits: Tensor) -> int:
        sequence = self._sequences.get(name)
        if sequence is None or sequence.over:
            return 0
        token = sequence.step(logits)
        if sequence.over:
            self._sequences.pop(name, None)
            self._manager.cancel_request(name)  # before the next step
        return token

    def _run(self) -> None:
        while not self._closing.wait(_POLL_SECONDS):
            result = self._manager.get_result(timeout=_POLL_SECONDS)
            if result is not None and result.error:
                log.error("transformers ended an answer: %s", result.error)
                self._drop(result.request_id, f"cannot generate: {result.error}")
            elif not self._manager.is_running():
                self._restart()

    def _restart(self) -> None:
        self._drop_all("the worker had to be started again")
        try:
            self._manager.stop(block=True, timeout=5)
            self._taken.close()
            self._manager = self._start()
        except Exception:  # no memory for the cache yet, say: /health shows it until a later turn
            log.exception("the worker could not be started again")
            self._closing.wait(1)

    def _drop(self, name: str, message: str) -> None:
        sequence = self._sequences.pop(name, None)
        if sequence is not None:
            sequence.fail(message)

    def _drop_all(self, message: str) -> None:
        for name in list(self._sequences):
            self._drop(name, message)


class _Taken:
    """Hand the experts that a step used to the sequences that ask for routes."""

    def __init__(self, model: Any, sequences: Mapping[str, Sequence]) -> None:
        self._model, self._sequences = model, sequences
        self._stack = ExitStack()
        self._choices: RouterChoices | None = None
        self._rows: list[tuple[RoutedTokens, int, slice]] = []

    def begin(self, requests: list[Any]) -> None:
        """Start recording before the forward of a step of transformers' loop."""
        self.close()  # of a step that failed
        self._choices, self._rows, row = None, [], 0
        for request in requests:
            rows = slice(row, row + request.query_length)
            row = rows.stop
            sequence = self._sequences.get(request.state.request_id)
            if sequence is not None and sequence.routed is not None:
                first = request.state.position_offset - request.query_length
                self._rows.append((sequence.routed, first, rows))
        if self._rows:
            self._choices = self._stack.enter_context(noting(self._model))

    def end(self) -> None:
        """Stop recording after the forward."""
        try:
            if self._choices is not None:
                experts = self._choices.experts()
                for routed, first, rows in self._rows:
                    routed.put(first, experts[rows])
        finally:
            self.close()
            self._choices, self._rows = None, []

    def close(self) -> None:
        """Leave no hook behind: the next loop records the same model."""
        self._stack.close()


class _Processors(ContinuousBatchingLogitsProcessorList):
    """Called before the forward of each step, with its requests, and after it."""

    def __init__(self, processors: LogitsProcessorList, taken: _Taken) -> None:
        super().__init__(processors)
        self._taken = taken

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        self._taken.begin(requests_in_batch)
        storage: Tensor = super().prepare_tensor_args(requests_in_batch, arg_storage)
        return storage

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        self._taken.end()
        chosen: Tensor = super().__call__(input_ids, scores, logits_processor_args)
        return chosen


class _Steps(ContinuousBatchingLogitsProcessor):
    """Leaves the token that each sequence has chosen as the only possible one of its row."""

    supported_kwargs: ClassVar[dict[str, type]] = {}
    ignored_kwargs = ()

    def __init__(self, step: Callable[[str, Tensor], int], moved: Callable[[], None]) -> None:
        self._step, self._moved = step, moved
        self._names: list[str] = []

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        self._names = [request.state.request_id for request in requests_with_new_token]
        return torch.zeros(len(self._names), dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        self._moved()
        if not self._names:
            return scores
        tokens = [self._step(name, scores[row]) for row, name in enumerate(self._names)]
        # Rows after them are of prompts that go on in the next step; nobody reads their token.
        return only(scores, tokens + [0] * (len(scores) - len(tokens)))
