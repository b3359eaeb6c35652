"""The table of checkpoints on chosen text."""

from collections.abc import Mapping
from typing import Any

from l2r.report.tables import Table

Records = Mapping[str, Mapping[str, Mapping[str, Any]]]  # checkpoint or pair -> text -> numbers

_CAPTION = (
    "Standard error and interval are of bits/byte, over documents. The first token of a document "
    "is predicted from what the tokenizer puts before a text, or from end-of-text."
)
_DIFFERENCES = " Differences are over the same documents, by pairs."
_OTHER_TOKENS = " Nats per token of different tokenizers are not comparable."


def text_table(losses: Records, differences: Records) -> Table:
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
    return Table("Loss on text", columns, tuple(rows), caption)


def _numbers(values: Mapping[str, Any]) -> tuple[float | None, ...]:
    bits, nats = values["bits_per_byte"] or {}, values["nats_per_token"] or {}
    counts = (values.get(name) for name in ("documents", "tokens", "bytes"))
    ends = (bits.get(name) for name in ("value", "error", "low", "high"))
    return (*counts, nats.get("value"), values.get("perplexity"), *ends)
