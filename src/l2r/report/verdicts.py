"""Verdict on a result in one sentence, the same on the terminal and at the head of a page."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from l2r.files.diagnosis import Diagnosis


class Verdict(NamedTuple):
    """says: the sentence. cannot: what the same numbers do not show, for a page."""

    says: str
    cannot: str = ""


def of_checkpoints(views: Mapping[str, Diagnosis]) -> Verdict:
    """Verdict of a diagnosis: experts ever first in each checkpoint, and its routing gain."""
    first = {name: ever_first(view) for name, view in views.items()}
    of = {name: len(view.array(0, "top1")) for name, view in views.items()}
    low = min(first, key=lambda name: min(first[name]) / of[name])
    experts = of[low]
    layers = "in its layer" if len(first[low]) == 1 else "by layer"
    many = f"Fewest of {len(views)}: " if len(views) > 1 else ""
    says = f"{many}{low} ever puts {span(first[low])} of {experts} experts first {layers}."
    gains = {n: v.numbers().get("routing_gain") for n, v in views.items()}
    if all(gain is not None for gain in gains.values()):
        worst = min(gains, key=lambda name: gains[name] or 0.0)
        whose = f" ({worst}, the least)" if len(views) > 1 else ""
        gain = gains[worst] or 0.0
        would = "cost" if gain >= 0 else "save"
        nats = f"{abs(gain):.3f}" if abs(gain) >= 0.0005 else "less than 0.001"
        says += f" Random experts instead would {would} {nats} nats{whose}."
    return Verdict(
        says,
        "Which router is better: that takes several seeds of each. The numbers are of the text or "
        "images read here; raw margins of different scorings have different units.",
    )


def ever_first(view: Diagnosis) -> list[int]:
    """Count, by layer, the experts that some token chose first."""
    return [int((use > 0).sum()) for use in view.by_layer("top1")]


def span(counts: Sequence[int]) -> str:
    """Least and most of some counts: ``8 to 10``, or ``8`` where all are."""
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"
