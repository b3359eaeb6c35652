"""Record the experts that vLLM takes, where its own flag does not run: on a CPU, say.

    llm = LLM(folder, worker_extension_cls=EXTENSION, enforce_eager=True)
    with recording(llm) as recorder:
        outputs = llm.generate(prompts, sampling)
        recorder.add_to(outputs)  # output.outputs[i].routed_experts, as vLLM's own flag gives them

vLLM's routers call a function with the experts that they chose, which this sets; so it sees what
vLLM took, of any model whose MoE layers are vLLM's.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from l2r.engines.vllm.steps import Scheduled, Steps
from l2r.errors import InputError

EXTENSION = "l2r.engines.vllm.recording.RecordsRoutes"


class RecordsRoutes:
    """Methods that vLLM adds to its workers; ``model_runner`` is the worker's."""

    model_runner: Any

    def start_routes(self) -> None:
        """Record from now on. Raises ValueError for a setting under which it would be wrong."""
        runner = self.model_runner
        if getattr(self, "_routes_recorder", None) is not None:
            raise InputError("routes are being recorded already; end the other block first")
        self._routes_recorder = _Recorder(runner)

    def recorded_routes(self) -> list[tuple[str, bytes, bytes]]:
        """Name of each request since the last call, its experts and where they are known."""
        return self._routes_recorder.take()

    def stop_routes(self) -> None:
        """Record no more."""
        recorder, self._routes_recorder = self._routes_recorder, None
        recorder.remove()

    _routes_recorder: Any = None


class Recording:
    """Experts of the requests of an ``LLM`` inside a block; see ``recording``."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._by_name: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def add_to(self, outputs: Sequence[Any]) -> None:
        """Set ``routed_experts`` of every completion: [tokens - 1, hidden layers, k].

        Raises ValueError for an output that was not generated in the block.
        """
        for name, experts, known in self._llm.collective_rpc("recorded_routes")[0]:
            self._by_name[name] = np.load(io.BytesIO(experts)), np.load(io.BytesIO(known))
        for output in outputs:
            for completion in output.outputs:
                tokens = len(output.prompt_token_ids) + len(completion.token_ids)
                name = self._name(output.request_id, completion.index, len(output.outputs))
                experts, known = self._by_name.pop(name)
                if len(known) < tokens - 1 or not known[: tokens - 1].all():
                    raise InputError(
                        f"request {output.request_id} has tokens whose experts were not recorded"
                    )
                completion.routed_experts = experts[: tokens - 1]

    def _name(self, request: str, index: int, choices: int) -> str:
        """Return the engine's own name of a completion's request: with random letters behind it."""
        number = f"{index}_" if choices > 1 else ""
        pattern = re.compile(re.escape(f"{number}{request}") + r"(-[0-9a-f]{8})?")
        names = [name for name in self._by_name if pattern.fullmatch(name)]
        if not names:
            raise InputError(f"request {request} was not generated in the block that records")
        return names[-1]


@contextmanager
def recording(llm: Any) -> Iterator[Recording]:
    """Record the experts of all requests of ``llm``, a vllm.LLM, inside the block.

    The cache of prefixes is emptied first: what is in it was not recorded. Raises ValueError for
    an engine without the extension, and for settings that cannot be recorded: CUDA graphs, several
    pipeline or data parallel ranks, sequence parallel experts, a cache filled by another engine.
    """
    parallel = llm.llm_engine.vllm_config.parallel_config
    if parallel.worker_extension_cls != EXTENSION:
        raise InputError(
            f"worker_extension_cls must be {EXTENSION!r} to record; "
            f"got {parallel.worker_extension_cls!r}"
        )
    check_settings(llm.llm_engine.vllm_config)
    llm.reset_prefix_cache()
    llm.collective_rpc("start_routes")
    try:
        yield Recording(llm)
    finally:
        llm.collective_rpc("stop_routes")


def check_settings(config: Any) -> None:
    """Raise ValueError for a setting under which a recording would be wrong or empty."""
    parallel = config.parallel_config
    wanted = {
        "pipeline_parallel_size": (parallel.pipeline_parallel_size, 1),
        "data_parallel_size": (parallel.data_parallel_size, 1),
        "decode_context_parallel_size": (
            getattr(parallel, "decode_context_parallel_size", 1),
            1,
        ),
        "use_sequence_parallel_moe": (
            getattr(parallel, "use_sequence_parallel_moe", False),
            False,
        ),
        "kv_transfer_config": (config.kv_transfer_config, None),
        "cudagraph_mode": (config.compilation_config.cudagraph_mode.name, "NONE"),
    }
    for name, (value, needed) in wanted.items():
        if value != needed:
            hint = " (enforce_eager=True)" if name == "cudagraph_mode" else ""
            raise InputError(f"{name} must be {needed} to record routes{hint}; got {value}")


class _Recorder:
    """A worker's: what its routers choose in a step, and for which requests."""

    def __init__(self, runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.layer import MoERunner
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        config = runner.vllm_config.model_config
        layers, top_k = config.get_total_num_hidden_layers(), config.get_num_experts_per_tok()
        kind = np.uint8 if config.get_num_experts() <= 256 else np.uint16
        table = runner.input_batch.block_table[0]
        self._runner, self._table = runner, table
        slots = runner.kv_cache_config.num_blocks * _block_size(runner)
        self._steps = Steps(layers, top_k, kind, slots)
        size = runner.scheduler_config.max_num_batched_tokens
        self._buffer = torch.zeros(size, layers, top_k, dtype=torch.int32, device=runner.device)
        self._routers = [m for m in runner.get_model().modules() if isinstance(m, MoERunner)]
        for module in self._routers:
            if not isinstance(module.router, BaseRouter):
                raise InputError(
                    f"routes must come from a router of vLLM's; got {type(module.router).__name__}"
                )
        if not self._routers:
            raise InputError("the model has no MoE layer of vLLM's")
        for module in self._routers:
            module.router.set_capture_fn(partial(self._capture, module.layer_id))
        self._forward = runner._model_forward
        runner._model_forward = self._model_forward

    def remove(self) -> None:
        """Leave the worker as it was."""
        del self._runner._model_forward
        for module in self._routers:
            module.router.set_capture_fn(None)

    def take(self) -> list[tuple[str, bytes, bytes]]:
        """All requests, which are then forgotten."""
        records = []
        for name in self._steps.names:
            experts, known = self._steps.read(name)
            records.append((name, _bytes(experts), _bytes(known)))
            self._steps.drop(name)
        return records

    def _capture(self, layer: int, experts: torch.Tensor) -> None:
        self._buffer[: len(experts), layer] = experts

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        batch = self._runner.input_batch
        starts = self._runner.query_start_loc.np[: batch.num_reqs + 1]
        size = self._table.block_size
        requests = []
        for row, name in enumerate(batch.req_ids[: batch.num_reqs]):
            first = int(batch.num_computed_tokens_cpu[row])
            count = int(starts[row + 1] - starts[row])
            positions = np.arange(first + count)
            blocks = self._table.block_table.np[row, positions // size].astype(np.int64)
            requests.append(Scheduled(name, first, count, blocks * size + positions % size))
        self._steps.add(requests, self._buffer[: int(starts[-1])].cpu().numpy())
        return output


def _block_size(runner: Any) -> int:
    """Tokens of a block of the cache of the first group of layers."""
    return int(runner.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size)


def _bytes(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=False)
    return stream.getvalue()
