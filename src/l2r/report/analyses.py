"""Sections of a page on what experts are used for, of checkpoints whose choices were noted."""

from collections.abc import Mapping
from typing import Any

from l2r.files.diagnosis import Diagnosis
from l2r.report.page import Section
from l2r.report.routing import (
    USAGE_TITLES,
    gain_bars,
    robustness_bars,
    usage_by_domain,
    usage_by_layer,
)
from l2r.report.specialization import (
    agreement_heatmaps,
    coactivation_heatmaps,
    domain_shares,
    frequency_lines,
    saturation_curves,
    specialization_by_layer,
)
from l2r.report.tables import Table

_SPECIALIZATION = (
    "Shares of a domain's or a word's tokens that go to the expert they go to most (OLMoE's "
    "domain and vocabulary specialization; words that occur often enough), how often an expert's "
    "most frequent partner is chosen with it, and the bits that the first expert of the layer "
    "before tells. Chance: the same with domains, documents (images) or experts permuted."
)
_AGREEMENT = (
    "Experts of different runs are numbered by accident, so only what holds under renaming is "
    "compared: each panel is of first experts on the same tokens."
)


def routing_sections(views: Mapping[str, Diagnosis]) -> list[Section]:
    """Make the sections that every page has, from what every diagnosis has."""
    usage = [usage_by_layer(views, kind) for kind in USAGE_TITLES]
    sections = [
        Section("Robustness", _ROBUST, [robustness_bars(views)]),
        Section("Expert usage by layer", USAGE_TEXT, usage),
    ]
    told = {name: view for name, view in views.items() if len(view.info["domains"]) > 1}
    if told:
        sections.append(Section("Expert usage by domain", _BY_DOMAIN, [usage_by_domain(told)]))
    return sections


def analysis_sections(views: Mapping[str, Diagnosis], *, details: bool) -> list[Section]:
    """Make the sections on noted choices; ``details`` adds figures of each checkpoint."""
    sections = []
    gained = {name: view for name, view in views.items() if "routing_gain" in view.numbers()}
    if gained:
        sections.append(Section("Routing gain", _gain_text(gained), [gain_bars(gained)]))
    noted = {name: view for name, view in views.items() if "data" in view.info}
    if not noted:
        return sections
    deep = max(len(view.layers) for view in noted.values()) > 1  # one layer makes no line
    parts: list[Any] = [specialization_by_layer(noted)] if deep else []
    worded = {name: view for name, view in noted.items() if "0.frequency" in view.arrays}
    if worded:
        parts.append(frequency_lines(worded))
    if parts:
        sections.append(Section("Specialization", _SPECIALIZATION, parts))
    if details:
        sections += [_details(name, view) for name, view in noted.items()]
    agreed = agreement_heatmaps(noted) if len(noted) > 1 else None
    if agreed is not None:
        sections.append(Section("Agreement of routers", _AGREEMENT, [agreed]))
    for name, view in noted.items():
        if len(view.info.get("over_time", {}).get("checkpoints", ())) > 1:
            figure = saturation_curves(view, view.info["over_time"])
            sections.append(Section(f"Saturation of {name}", _SATURATION, [figure]))
    return sections


_SATURATION = (
    "Share of the experts that a checkpoint chooses for a token which the last checkpoint "
    "chooses too (OLMoE's router saturation)."
)


_ROBUST = (
    "Margin / spread: gap between the two largest logits over their standard deviation. Stability "
    "and overlap: of the first expert and of the chosen set, under Gaussian noise on the router "
    "input. Raw margins have the unit of their scoring, so no bars compare them."
)
USAGE_TEXT = "Rows are layers, columns experts. 1 (white) is an even share."
_BY_DOMAIN = (
    "The same layer's experts under text of different domains or images of different classes; an "
    "expert that is red in one row and blue in the others has specialized."
)


def _gain_text(views: Mapping[str, Diagnosis]) -> str:
    losses = ", ".join(f"{n} {v.numbers()['cross_entropy']:.4f}" for n, v in views.items())
    return (
        "What the choice of experts is worth: at 0 any experts would do as well. With their own "
        f"experts, on the rows of this diagnosis (not the whole validation data): {losses} nats."
    )


def _details(name: str, view: Diagnosis) -> Section:
    """Domains, pairs and paths of one checkpoint."""
    layers = view.few_layers()
    parts: list[Any] = [coactivation_heatmaps(view, layers, name)]
    if len(view.info["domains"]) > 1:
        parts.insert(0, domain_shares(view, layers, name))
    tokens = view.arrays["0.experts"][..., 0] >= 0
    rows = tuple(
        (" → ".join(map(str, path)), count, count / int(tokens.sum()))
        for path, count in view.info["paths"]
    )
    caption = "First experts from the first layer to the last."
    columns = ("path", "tokens", "share")
    parts.append(Table("Most frequent paths through the layers", columns, rows, caption))
    return Section(f"Experts of {name}", parts=parts)
