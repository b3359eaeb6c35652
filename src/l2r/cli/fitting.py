"""Fit new routers of a checkpoint to its old ones, for ``l2r swap --fit``."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from l2r.cli.experiment import say
from l2r.report.tables import Table

if TYPE_CHECKING:
    from l2r.routers import RouterConfig
    from l2r.training import FitOptions, FitReport, JointOptions


def fit_to_old(
    checkpoint: Path,
    model: Any,
    tokenizer: Any,
    config: "RouterConfig",
    *,
    data: Path | None = None,
    tokens: int = 200_000,
    held_out: int = 50_000,
    length: int = 256,
    batch_size: int = 8,
    options: "FitOptions | None" = None,
    joint: "JointOptions | None" = None,
    layers: list[int] | None = None,
    selection: str = "family",
) -> "FitReport":
    """Replace the routers of ``model`` by fitted ones, with a progress bar.

    ``data`` is a folder of text, None for the embedded text. Raises ValueError as
    ``l2r.training.upcycling`` does.
    """
    from l2r.cli.console import progress_bars
    from l2r.training import unseen_part, upcycle
    from l2r.training.data import CorpusOptions, sample_batches

    batches, other = sample_batches(
        tokenizer,
        corpus=unseen_part(checkpoint, data) or CorpusOptions(str(data)),
        tokens=tokens,
        held_out_tokens=held_out,
        sequence_length=length,
        batch_size=batch_size,
        report=say,
    )
    with progress_bars() as report:
        return upcycle(
            model,
            config,
            batches,
            other,
            options=options,
            joint=joint,
            layers=layers,
            selection=selection,
            report=report,
        )


def _verdict(result: "FitReport") -> str:
    """Perplexity at the ends, and the mean agreement."""
    (first, before), *_, (last, after) = result.perplexity.items()
    agreed = sum(layer.agreement for layer in result.layers) / max(1, len(result.layers))
    return (
        f"Perplexity {before:.2f} ({first}), {after:.2f} ({last}); the new routers choose "
        f"{agreed:.0%} of the old routers' experts."
    )


def fit_tables(result: "FitReport", kind: str) -> tuple[Table, Table]:
    """Agreement and divergence per layer; perplexity per stage."""
    columns = ("layer", "agreement drawn", "agreement fitted", "KL drawn", "KL fitted")
    rows = [
        (f.layer, f.agreement_before, f.agreement, f.divergence_before, f.divergence)
        for f in result.layers
    ]
    agreement = Table(
        f"{kind}: agreement with the old routers",
        columns,
        tuple(rows),
        verdict=_verdict(result),
        caption="Share of a token's experts that old and new router both choose; held-out text.",
    )
    stages = tuple(result.perplexity.items())
    return agreement, Table(
        "Perplexity on held-out text", ("stage", "perplexity"), stages, digits=3
    )
