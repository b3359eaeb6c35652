"""``l2r serve``: a checkpoint behind an OpenAI-compatible server."""

from pathlib import Path
from typing import Annotated

import typer

from l2r.cli.options import Device, TrustRemoteCode


def serve(
    checkpoint: Annotated[Path, typer.Argument(help="Run folder or Hugging Face folder.")],
    *,
    name: Annotated[
        str | None, typer.Option(help="What requests call the model (default: the folder's name).")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    device: Device = "auto",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or auto: the checkpoint's own.")
    ] = "auto",
    continuous_batching: Annotated[
        bool, typer.Option("--continuous-batching", help="Batch requests as they come.")
    ] = False,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            help="With continuous batching: key-value cache in blocks of 256 tokens (default: 64 "
            "on a CPU, elsewhere what fits into memory).",
            min=1,
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Serve a language model with transformers' OpenAI-compatible server.

    Answers /v1/completions, /v1/chat/completions (where the tokenizer has a chat template),
    /v1/models and /health until interrupted.

    Example: l2r serve runs/demo/l2r-sips --port 8000 --continuous-batching
    """
    from l2r.integrations.transformers_server import serve as start

    start(
        checkpoint,
        name=name,
        host=host,
        port=port,
        device=device,
        dtype=dtype,
        continuous_batching=continuous_batching,
        num_blocks=num_blocks,
        trust_remote_code=trust_remote_code,
    )
    raise KeyboardInterrupt  # nothing else ends the server, and asyncio swallows it now and then
