"""The table of checkpoints on chosen text."""

import math
from collections.abc import Mapping
from typing import Any

from l2r.report.tables import Table

LossRecords = Mapping[str, Mapping[str, Mapping[str, Any]]]  # checkpoint or pair -> text -> numbers

_CAPTION = (
    "Standard error and interval are of bits/byte, over documents. The first token of a document "
    "is predicted from what the tokenizer puts before a text, or from end-of-text."
)
_DIFFERENCES = " Differences are over the same documents, by pairs."
_OTHER_TOKENS = " Nats per token of different tokenizers are not comparable."


def text_table(losses: LossRecords, differences: LossRecords) -> Table:
    """Numbers of every checkpoint on every text, then of every pair; both by name and text."""
    rows = [
        (name, text, *_numbers(values))
        for records in (losses, differences)
        for name, of in records.items()
        for text, values in of.items()
    ]
    others = any(v["nats_per_token"] is None for of in differences.values() for v in of.values())
    caption = _CAPTION + (_DIFFERENCES if differences else "") + (_OTHER_TOKENS if others else "")
    columns = (
        "Model", "Text", "documents", "tokens", "bytes", "nats/token", "perplexity", "bits/byte",
        "standard error", "95% from", "95% to",
    )  # fmt: skip
    few = ("Text", "perplexity", "bits/byte", "95% from", "95% to")
    verdict = _verdict(losses, differences) + (_OTHER_TOKENS if others else "")
    return Table("Loss on text", columns, tuple(rows), caption, few=few, verdict=verdict)


def _verdict(losses: LossRecords, differences: LossRecords) -> str:
    """Bits per byte of one checkpoint, the one difference, or how many differences leave out 0."""
    records = differences or losses
    rows = [(n, t, v["bits_per_byte"] or {}) for n, of in records.items() for t, v in of.items()]
    if differences and len(rows) > 1:
        measured = [bits for _, _, bits in rows if bits.get("low") is not None]
        apart = sum(bits["low"] > 0 or bits["high"] < 0 for bits in measured)
        return (
            f"{apart} of {len(rows)} differences from {next(iter(losses))} in bits per byte "
            f"{'has' if apart == 1 else 'have'} a 95% interval without 0."
        )
    name, text, bits = rows[-1]
    sign = "+" if differences else ""
    sentence = f"{name} on {text}: {bits.get('value', math.nan):{sign}.3f} bits per byte"
    if bits.get("low") is None:  # one document has no spread
        return f"{sentence}."
    return f"{sentence}, 95% interval {bits['low']:{sign}.3f} to {bits['high']:{sign}.3f}."


def _numbers(values: Mapping[str, Any]) -> tuple[float | None, ...]:
    bits, nats = values["bits_per_byte"] or {}, values["nats_per_token"] or {}
    counts = (values.get(name) for name in ("documents", "tokens", "bytes"))
    ends = (bits.get(name) for name in ("value", "error", "low", "high"))
    return (*counts, nats.get("value"), values.get("perplexity"), *ends)
