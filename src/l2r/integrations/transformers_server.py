"""A checkpoint behind transformers' own OpenAI-compatible server.

The server finds the class of a model by its name inside transformers, where ours and swapped
models are not. Here it loads them as every command does; HTTP, batching and streaming are its own.
"""

import socket
from pathlib import Path
from typing import Any

import transformers

from l2r.checkpoints.loading import load_tokenizer
from l2r.checkpoints.pretrained import checkpoint_folder, load_pretrained
from l2r.integrations.tried import outside_tried

_CPU_BLOCKS = 64  # of 256 tokens; transformers' own choice takes all memory and a minute to fill it


def serve(
    checkpoint: Path,
    *,
    name: str | None = None,
    host: str = "localhost",
    port: int = 8000,
    device: str = "cpu",
    dtype: str = "auto",
    continuous_batching: bool = False,
    num_blocks: int | None = None,
    non_blocking: bool = False,
    trust_remote_code: bool = False,
) -> Any:
    """Serve until interrupted; with ``non_blocking`` return transformers' ``Serve``, running.

    ``name`` is what requests call the model, the folder's name by default. ``num_blocks`` sizes the
    key-value cache of continuous batching. Raises ValueError for a checkpoint that cannot be
    loaded or has no tokenizer, OSError where host and port cannot be had.
    """
    problem = outside_tried("transformers", transformers.__version__, ">=5.19,<5.24")
    if problem:
        raise ValueError(problem)
    if num_blocks is not None and not continuous_batching:
        raise ValueError(f"num_blocks is for continuous batching; got num_blocks={num_blocks}")
    # The server would name transformers' extra where one is missing, not ours.
    import fastapi  # noqa: F401
    import openai  # noqa: F401
    import uvicorn  # noqa: F401
    from transformers.cli import serve as command
    from transformers.cli.serving import model_manager

    if load_tokenizer(checkpoint, trust_remote_code=trust_remote_code) is None:
        raise ValueError(f"checkpoint must hold a tokenizer; got {checkpoint}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host, port), family=family).close()  # before minutes of loading
    if continuous_batching and num_blocks is None and device == "cpu":
        num_blocks = _CPU_BLOCKS
    name = name or checkpoint.resolve().name
    usual = model_manager.ModelManager
    model_manager.ModelManager = _loading(usual, checkpoint, name, trust_remote_code)
    try:
        return _ending(command.Serve)(
            force_model=name,
            host=host,
            port=port,
            device=device,
            dtype=dtype,
            continuous_batching=continuous_batching,
            cb_num_blocks=num_blocks,
            non_blocking=non_blocking,
        )
    finally:
        model_manager.ModelManager = usual


def _ending(usual: type) -> type:
    """transformers' server, whose batching thread outlives it: the process would never end."""

    class Ending(usual):
        def __init__(self, *, non_blocking: bool, **options: Any) -> None:
            try:
                super().__init__(non_blocking=non_blocking, **options)
            finally:
                state = getattr(self, "_generation_state", None)
                if state is not None and not non_blocking:
                    state.shutdown()

    return Ending


def _loading(usual: type, checkpoint: Path, name: str, trust_remote_code: bool) -> type:
    """transformers' manager of models for this checkpoint alone."""

    class OneCheckpoint(usual):
        def _load_model(self, *args: Any, **kwargs: Any) -> Any:
            model = load_pretrained(
                checkpoint, dtype=self.dtype, trust_remote_code=trust_remote_code
            )
            return model.eval().to(self.device)

        def _load_processor(self, *args: Any, **kwargs: Any) -> Any:
            return load_tokenizer(checkpoint, trust_remote_code=trust_remote_code)

        def get_gen_models(self) -> list[dict[str, Any]]:
            created = int(checkpoint_folder(checkpoint).stat().st_mtime)
            return [{"id": name, "object": "model", "owned_by": "l2r", "created": created}]

    return OneCheckpoint
