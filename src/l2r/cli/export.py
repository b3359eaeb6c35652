"""``l2r export``: a checkpoint that needs no package of ours, or one program."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from l2r.cli.options import (
    NEW_FOLDER,
    Checkpoint,
    DeviceMap,
    Dtype,
    Revision,
    TrustRemoteCode,
)
from l2r.cli.output import echo, say, say_left_out
from l2r.errors import InputError


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, NEW_FOLDER],
    *,
    form: Annotated[
        Literal["hf", "onnx", "torch-export"],
        typer.Option("--format", help="hf, onnx or torch-export."),
    ] = "hf",
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Largest difference allowed between the logits of program and model, as a share "
            "of the largest logit (default: 1e-4).",
            min=0,
        ),
    ] = None,
    revision: Revision = None,
    dtype: Dtype = "auto",
    device_map: DeviceMap = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a checkpoint with the code of its routers, which transformers loads without this
    package (trust_remote_code=True), or one program.

    The folder gets weights, configuration, tokenizer, model card and code. A program is
    any language model with our routers as ONNX or torch.export, for a CPU and in fp32.

    Example: l2r export runs/demo/l2r-sips --out my-l2r-olmoe
    """
    from l2r.files.atomic import check_new_folder
    from l2r.hf.checkpoints import Placement, check_is_language_model, local_checkpoint

    if form == "hf" and tolerance is not None:
        raise InputError(f"tolerance is for programs; got tolerance={tolerance} with format=hf")
    if form != "hf" and (device_map is not None or dtype not in ("auto", "float32")):
        raise InputError(
            f"a program is of one device and float32; got dtype={dtype}, {device_map=}"
        )
    placement = Placement(dtype, device_map=device_map, report=say)
    check_new_folder(out)
    folder = local_checkpoint(checkpoint, revision=revision, code=trust_remote_code)
    check_is_language_model(folder, checkpoint)

    from l2r.cli.console import progress_bars
    from l2r.hf.checkpoints import (
        PROGRAM_TOLERANCE,
        CheckpointCopy,
        checkpoint_folder,
        export_program,
        export_remote_code,
        load_causal_lm,
        load_tokenizer,
        run_of_checkpoint,
        run_sections,
    )
    from l2r.hf.models import auto_class, check_parts, check_whole, check_whole_weights

    placement = placement.here()
    sections = run_sections(run_of_checkpoint(folder))
    if form == "hf":
        source = checkpoint_folder(folder)
        code: Any = {"trust_remote_code": trust_remote_code}
        copy = CheckpointCopy.on_meta(folder, say, **code) if dtype == "auto" else None
        if copy is not None:
            model, tokenizer = copy.model, load_tokenizer(folder, **code)
            check_parts(model, source, checkpoint)
        else:
            check_whole_weights(source, checkpoint)
            model, tokenizer = load_causal_lm(folder, placement=placement, **code)
            check_whole(model, source, checkpoint, rounded=True)
        with progress_bars() as bars:
            write = None if copy is None else partial(copy.write, report=partial(bars, "files"))
            more: dict[str, Any] = {"sections": sections, "write": write}
            export_remote_code(model, out, tokenizer=tokenizer, source=source, **more)
        if copy is not None:
            say(str(copy.copied))
        opens = f"{auto_class(model).__name__}.from_pretrained"
        call = f"{opens}({str(out)!r}, trust_remote_code=True)"
        say_left_out(checkpoint, source, out)
        echo(f"saved: {out}; load it with {call}")
        return
    model, tokenizer = load_causal_lm(folder, trust_remote_code=trust_remote_code)
    tolerance = PROGRAM_TOLERANCE if tolerance is None else tolerance
    agreement = export_program(
        model, out, form=form, tokenizer=tokenizer, tolerance=tolerance, sections=sections
    )
    echo(
        f"saved: {out}; logits differ by at most {agreement.difference:.2g} from the model's, "
        f"whose largest is {agreement.largest:.3g} (tolerance {tolerance:g} of that)"
    )
