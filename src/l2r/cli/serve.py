"""``l2r serve``: a checkpoint behind an OpenAI-compatible server."""

from typing import Annotated

import typer

from l2r.cli.options import Checkpoint, Device, DeviceMap, Dtype, Revision, TrustRemoteCode
from l2r.cli.output import say
from l2r.files.wording import named_path


def serve(
    checkpoint: Checkpoint,
    *,
    name: Annotated[
        str | None, typer.Option(help="Model name in requests (default: the folder's name).")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Further name allowed in the Host header of requests, beside localhost and --host "
            "(repeatable)."
        ),
    ] = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    device_map: DeviceMap = None,
    max_requests: Annotated[
        int, typer.Option(help="Requests in flight; more get 429.", min=1, max=4096)
    ] = 64,
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
    """Serve a language model behind an OpenAI-compatible server.

    Answers /v1/completions, /v1/chat/completions (where the tokenizer has a chat template),
    /v1/models and /health until interrupted.

    Example: l2r serve runs/demo/l2r-sips --port 8000 --continuous-batching
    """
    from l2r.engines.serve import ServeLimits, ServeOptions, check_address
    from l2r.hf.checkpoints import (
        Placement,
        check_is_language_model,
        check_reads_text,
        checkpoint_folder,
        local_checkpoint,
        weight_sizes,
    )

    options = ServeOptions(
        name=name or named_path(checkpoint).name,
        host=host,
        port=port,
        allowed_hosts=tuple(allowed_host or ()),
        placement=Placement(dtype, device, device_map, say),
        continuous_batching=continuous_batching,
        num_blocks=num_blocks,
        trust_remote_code=trust_remote_code,
        limits=ServeLimits(max_requests=max_requests, max_connections=max_requests + 192),
    )
    folder = local_checkpoint(checkpoint, revision=revision, code=trust_remote_code)
    check_is_language_model(folder, checkpoint)
    check_reads_text(folder)
    check_address(host, port)
    if line := weight_sizes(checkpoint_folder(folder), dtype).layout:
        say(line)
    from l2r.engines.serve import serve_checkpoint

    serve_checkpoint(folder, options)
    raise KeyboardInterrupt  # nothing else ends the server, and asyncio swallows it now and then
