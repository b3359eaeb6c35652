"""``l2r export``: a checkpoint that plain transformers loads, without this package."""

from pathlib import Path
from typing import Annotated

import typer

from l2r.cli.options import NEW_FOLDER


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Our OLMoE, a run, or a swapped OLMoE.")],
    out: Annotated[Path, NEW_FOLDER],
) -> None:
    """Write an OLMoE with our routers and its code in one file, for
    AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True).

    The folder gets weights, configuration, tokenizer and modeling file.

    Example: l2r export runs/demo/l2r-sips --out my-l2r-olmoe
    """
    from l2r.checkpoints import load_causal_lm
    from l2r.checkpoints.export import export_remote_code
    from l2r.checkpoints.pretrained import check_new_folder

    check_new_folder(out)
    model, tokenizer = load_causal_lm(checkpoint, dtype="auto")
    folder = export_remote_code(model, out, tokenizer=tokenizer)
    call = f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)"
    typer.echo(f"saved: {folder}; load it with {call}")
