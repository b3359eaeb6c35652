"""``l2r upcycle``: swap the routers of a checkpoint and fit the new ones to the old."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from l2r.cli.experiment import say
from l2r.cli.options import (
    NEW_FOLDER,
    AsJson,
    BatchSize,
    Checkpoint,
    Device,
    DeviceMap,
    Dtype,
    Layers,
    Revision,
    RouterChanges,
    TrustRemoteCode,
    must_exist,
    read_layers,
    read_router,
)
from l2r.runs.plain_json import plain_json


def upcycle(
    checkpoint: Checkpoint,
    changes: RouterChanges = None,
    layers: Layers = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of text (default: embedded text).", callback=must_exist),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to fit on.", min=1)] = 200_000,
    held_out: Annotated[int, typer.Option(help="Tokens to measure on.", min=1)] = 50_000,
    length: Annotated[int, typer.Option(help="Tokens per row.", min=2)] = 256,
    batch_size: BatchSize = 8,
    updates: Annotated[int, typer.Option(help="Fit updates per batch; 0 copies nothing.")] = 4,
    lr: Annotated[float, typer.Option(help="Learning rate of the fit.")] = 0.01,
    train_steps: Annotated[int, typer.Option(help="Steps of joint training afterwards.")] = 0,
    train_lr: Annotated[float, typer.Option(help="Learning rate of joint training.")] = 1e-4,
    out: Annotated[Path | None, NEW_FOLDER] = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    device_map: DeviceMap = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Replace the routers of a checkpoint by ones fitted to the old ones' decisions.

    Prints agreement per layer and perplexity per stage.

    Example: l2r upcycle my-olmoe router.kind=l2r_sips rank=8 --out my-l2r
    """
    from l2r.hf.checkpoints import (
        Placement,
        check_is_language_model,
        check_reads_text,
        local_checkpoint,
    )
    from l2r.runs.atomic import check_new_folder
    from l2r.training import FitOptions, JointOptions

    options, joint = FitOptions(updates, lr), JointOptions(train_steps, train_lr)
    placement, chosen = Placement(dtype, device, device_map, say), read_layers(layers)
    if out is not None:
        check_new_folder(out)
    folder = local_checkpoint(checkpoint, revision=revision, code=trust_remote_code)
    check_is_language_model(folder, checkpoint)
    check_reads_text(folder)
    router = read_router(changes)

    from l2r.cli.console import print_table
    from l2r.cli.fitting import fit_tables, fit_to_old
    from l2r.hf.checkpoints import (
        checkpoint_folder,
        load_causal_lm,
        processor_files,
        save_model,
    )
    from l2r.hf.models import check_source, check_whole
    from l2r.hf.swap import preferred_router, select_sites

    source = checkpoint_folder(folder)
    if out is not None:
        check_source(source, checkpoint)
    model, tokenizer = load_causal_lm(
        folder,
        placement=placement,
        trust_remote_code=trust_remote_code,
    )
    sites = select_sites(model, chosen)
    if out is not None:
        replaced = [site.path for site in sites]
        check_whole(model, source, checkpoint, replaced=replaced, rounded=dtype != "auto")
    config = preferred_router(model, sites[0], options=router)
    result = fit_to_old(
        folder,
        model,
        tokenizer,
        config,
        data=data,
        tokens=tokens,
        held_out=held_out,
        length=length,
        batch_size=batch_size,
        options=options,
        joint=joint,
        layers=chosen,
    )
    if as_json:
        typer.echo(plain_json(asdict(result)))
    else:
        for table in fit_tables(result, config.kind):
            print_table(table)
    if out is not None:
        card = (
            f"## How it was made\n\n`l2r upcycle {Path(checkpoint).resolve().name} "
            f"--tokens {tokens} --updates {updates} --train-steps {train_steps}` put new routers "
            "into it and fitted them to the decisions of its own."
        )
        files = processor_files(folder)
        save_model(model, out, tokenizer=tokenizer, files=files, sections=[card])
        typer.echo(f"saved: {out}; load it with l2r.load_pretrained({str(out)!r})", err=as_json)
