"""Verdict on a result in one sentence, the same on the terminal and at the head of a page."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from l2r.files.diagnosis import Diagnosis


class Verdict(NamedTuple):
    """says: the sentence. cannot: what the same numbers do not show, for a page."""

    says: str
    cannot: str = ""


def of_checkpoints(views: Mapping[str, Diagnosis]) -> Verdict:
    """Verdict of a diagnosis: the checkpoint with the fewest first choices, and routing gains."""
    return Verdict(
        " ".join(filter(None, (_fewest(views), _least_gain(views)))),
        "Which router is better: that takes several seeds of each. The numbers are of the text or "
        "images read here; raw margins of different scorings have different units.",
    )


def _fewest(views: Mapping[str, Diagnosis]) -> str:
    """Say who uses the fewest experts as a first choice, and in which of its layers."""
    first = {name: ever_first(view) for name, view in views.items()}
    of = {name: len(view.array(0, "top1")) for name, view in views.items()}
    share = {name: min(first[name]) / of[name] for name in views}
    low = min(share, key=lambda name: share[name])
    few, experts = min(first[low]), of[low]
    layer = views[low].label(first[low].index(few))
    where = f" in its narrowest layer, {layer}" if len(first[low]) > 1 else ""
    if few == experts:
        who = low if len(views) == 1 else "Every checkpoint"
        all_ = f"all its {experts} experts" if len({*of.values()}) == 1 else "all its experts"
        return f"{who} uses {all_} as a first choice{' in every layer' * (where != '')}."
    if len(views) == 1:
        return f"{low} uses {few} of {experts} experts as a first choice{where}."
    fewest = "the fewest experts" if len({*of.values()}) == 1 else "the smallest share of experts"
    alike = [name for name in views if share[name] == share[low]]
    who = f"{low} uses" if len(alike) == 1 else f"{', '.join(alike[:-1])} and {alike[-1]} use"
    if len(alike) > 1:
        where = " in the narrowest layer of each"
    many = f"{few} of {experts}" if len({of[name] for name in alike}) == 1 else f"{share[low]:.0%}"
    return f"{who} {fewest} as a first choice: {many}{where}."


def _least_gain(views: Mapping[str, Diagnosis]) -> str:
    """Say whose loss rises least with random experts; nothing where a gain was not measured."""
    gains = {name: view.numbers().get("routing_gain") for name, view in views.items()}
    if any(gain is None for gain in gains.values()):
        return ""
    least = min(gains, key=lambda name: gains[name] or 0.0)
    gain = gains[least] or 0.0
    with_random = f"With random experts the loss of {least}"
    if abs(gain) < 0.0005:
        return f"{with_random} changes by less than 0.001 nats: its routing gains nothing here."
    if gain < 0:
        return f"{with_random} falls by {-gain:.3f} nats."
    return f"{with_random} rises{' least,' * (len(views) > 1)} by {gain:.3f} nats."


def ever_first(view: Diagnosis) -> list[int]:
    """Count, by layer, the experts that some token chose first."""
    return [int((use > 0).sum()) for use in view.by_layer("top1")]


def span(counts: Sequence[int]) -> str:
    """Least and most of some counts: ``8 to 10``, or ``8`` where all are."""
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"
