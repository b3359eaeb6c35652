"""Routes that differ: verdict, tables for the terminal, and the page of mismatch.html and .js."""

import base64
from pathlib import Path
from typing import Any

import numpy as np

from l2r.files.mismatch import LARGE, NO_STATEMENT, Mismatch
from l2r.report.page import write_script_page
from l2r.report.references import FLIPS, REFERENCES
from l2r.report.tables import Table

_SHOWN = 1024  # tokens of the page's text
_NAMES = {
    "bf16": "bf16",
    "int8": "int8 weights",
    "fp8": "fp8 weights",
    "vllm": "vLLM",
    "sglang": "SGLang",
}


def verdict(result: Mismatch, against: str) -> str:
    """Say how many tokens take other experts, and what that costs."""
    totals, costs = result.totals(), result.costs()
    share = totals["tokens_changed"]
    if share is None:
        return "No token has a route on both sides: nothing was compared."
    other = _NAMES.get(against, Path(against).name)
    layers = totals["layers"]
    where = f" in at least one of {layers} layers" if layers > 1 else ""
    line = (
        f"{_percent(share)} of {totals['tokens']:,} tokens take other experts with {other}{where}; "
        f"{_percent(totals['experts_kept'])} of all choices stay."
    )
    rise = costs["own"]["loss"]
    if rise is not None and costs["replayed"]["mean"] is not None:
        small = abs(rise) < 0.0005
        way = "changes" if small else "falls" if rise < 0 else "rises"
        line += f" The loss {way} by {'less than 0.001' if small else f'{abs(rise):.3f}'} nats."
    return line


def cost(result: Mismatch) -> str:
    """Say what changes a log-probability, and what replayed routes change; empty if unknown."""
    costs = result.costs()
    own, same = costs["own"]["mean"], costs["replayed"]["mean"]
    if own is None:
        return ""
    if same is None:
        return f"Their experts alone change a log-probability by {_small(own)} on average."
    return (
        f"A log-probability changes by {_small(own)} on average, and by {_small(same)} when both "
        "take the same experts."
    )


def reference(against: str) -> str:
    """Share of tokens that changed in our own runs, where there is such a reference."""
    if against != "bf16":
        return ""
    (row,) = (row for row in REFERENCES if row.number == FLIPS)
    return f"Reference, share of tokens in small runs of ours: {row.runs}. It is no limit."


def limits(result: Mismatch) -> str:
    """Limits of the numbers, in words."""
    parts = [
        f"{len(result.tokens):,} tokens of {len(result.lengths)} sequences of one text: rare flips "
        "may be missing, and another text may flip more.",
        "A token that differs in an early layer changes what later layers and later tokens read, "
        "so flips are not independent.",
    ]
    remarks = sorted({str(remark) for remark in result.remarks.tolist() if remark})
    if remarks:
        parts.append(f"No certificate in some layers: {'; '.join(remarks)}.")
    else:
        parts.append(
            "A decision without a certificate may still be safe: most of them do not change."
        )
    return " ".join(parts)


def tables(result: Mismatch) -> list[Table]:
    """Layers, costs and margins, six columns at most."""
    layers = tuple(
        (
            row["layer"],
            _percent(row["changed"]),
            _percent(row["kept"]),
            _small(row["input_change"]),
            _percent(row["certified"]),
            row["certified_changed"],
        )
        for row in result.by_layer()
    )
    costs = result.costs()
    rows = (
        ("rise of the loss, nats", "loss"),
        ("KL(reference, other), nats", "kl"),
        ("log-probability, mean change", "mean"),
        ("largest change", "largest"),
    )
    shown = [(name, *(_small(costs[side][key]) for side in costs)) for name, key in rows]
    large = (f"changed by over {LARGE}", *(_percent(costs[side]["large"]) for side in costs))
    margins = tuple(
        (
            f"{row['from']:.3g} to {row['to']:.3g}",
            _percent(row["changed"]),
            _percent(row["certified"]),
        )
        for row in result.by_margin()
    )
    printed = [
        Table(
            "Decisions that differ, by layer",
            ("layer", "changed", "kept", "input moved", "certified", "certified, changed"),
            layers,
        ),
        Table("What it costs", ("", "own experts", "same experts"), (*shown, large)),
    ]
    by_margin = "Decisions by margin (k-th minus next logit)"
    if margins:
        printed.append(Table(by_margin, ("margin", "changed", "certified"), margins))
    return printed


def write_mismatch(path: Path, result: Mismatch, *, name: str, against: str) -> Path:
    """Write the page of one comparison; ``name`` is the reference's."""
    title = f"Routes of {name} against {_NAMES.get(against, Path(against).name)}"
    return write_script_page(path, "mismatch", title=title, data=page_data(result, title, against))


def page_data(result: Mismatch, title: str, against: str) -> dict[str, Any]:
    """Collect the data of the page's script: words, sums, and the first tokens of each domain."""
    shown = _shown_rows(result)
    starts = np.cumsum(result.lengths) - result.lengths
    columns = min(int(result.lengths.max()), max(1, _SHOWN // max(1, len(shown))))
    parts = [np.arange(starts[r], starts[r] + min(result.lengths[r], columns)) for r in shown]
    places = np.concatenate(parts)
    certified = np.where(result.certified == NO_STATEMENT, 2, result.certified)
    kind = "<u2" if max(result.experts.max(), result.other_experts.max()) > 254 else "u1"
    none = np.iinfo(np.dtype(kind)).max
    other = np.where(result.other_experts < 0, none, result.other_experts)
    return {
        "title": title,
        "verdict": verdict(result, against),
        "limits": limits(result),
        "reference": reference(against),
        "cost": cost(result),
        "tables": [
            {"title": table.title, "columns": table.columns, "rows": _cells(table)}
            for table in tables(result)[1:2]
        ],
        "layers": [_bar(f"{row['layer']}", row) for row in result.by_layer()],
        "margins": [
            _bar(f"{row['from']:.2g} to {row['to']:.2g}", row) for row in result.by_margin()
        ],
        "positions": [_bar(row["tokens_of"], row) for row in result.by_position()],
        "kinds": [_bar(row["tokens_of"], row) for row in result.by_kind()],
        "numbers": result.layers.tolist(),
        "domains": result.domains.tolist(),
        "passages": [
            {"domain": int(result.domain[r]), "tokens": len(part)}
            for r, part in zip(shown, parts, strict=True)
        ],
        "pieces": [str(piece) for piece in result.pieces[result.tokens[places]]],
        "chosen": result.experts.shape[-1],
        "wide": kind != "u1",
        "experts": _base64(result.experts[:, places], kind),
        "other": _base64(other[:, places], kind),
        "changed": _base64(result.changed[:, places], "u1"),
        "certified": _base64(certified[:, places], "u1"),
        "gap": _base64(result.gap[:, places], "<f4"),
        "moved": _base64(result.moved[:, places], "<f4"),
        "own": _base64(result.own[places], "<f4"),
        "replayed": _base64(result.replayed[places], "<f4"),
    }


def _shown_rows(result: Mismatch) -> list[int]:
    """Sequences on the page, as many from every domain."""
    longest = max(1, int(result.lengths.max()))
    domains = np.unique(result.domain)
    each = max(1, _SHOWN // (longest * len(domains)))
    return [int(r) for d in domains for r in np.flatnonzero(result.domain == d)[:each]]


def _bar(name: str, row: dict[str, Any]) -> dict[str, Any]:
    note = {
        "certified": "certified",
        "certified_changed": "of the certified changed",
        "mean": "mean change of a log-probability",
    }
    told = [
        f"{row[key]:,} {words}" if type(row[key]) is int
        else f"{_small(row[key]) if key == 'mean' else _percent(row[key])} {words}"
        for key, words in note.items()
        if row.get(key) is not None
    ]  # fmt: skip
    return {"name": name, "value": row["changed"], "note": ", ".join(told)}


def _cells(table: Table) -> list[list[str]]:
    return [[table.show(value) for value in row] for row in table.rows]


def _percent(share: float | None) -> str | None:
    if share is None:
        return None
    if 0 < share < 0.00005:
        return "<0.01%"
    if 0.99995 < share < 1:  # one choice that changed is not 100% kept
        return ">99.99%"
    return f"{100 * share:.2f}%" if share < 0.1 or 0.999 < share < 1 else f"{100 * share:.1f}%"


def _small(value: float | None) -> str | None:
    return None if value is None else f"{value:.2g}"


def _base64(values: np.ndarray, kind: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values).astype(kind).tobytes()).decode()
