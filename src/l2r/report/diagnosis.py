"""The page and the tables of ``l2r diagnose``, from the folders that it writes."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from l2r.files.arrays import TextRouting
from l2r.files.diagnosis import Diagnosis
from l2r.report.analyses import USAGE_TEXT, analysis_sections, routing_sections
from l2r.report.geometry import cosine_variance_bars, pca_scatter, routing_planes
from l2r.report.page import Key, Section, write_page
from l2r.report.palette import EXPERTS, INK
from l2r.report.passages import first_passages
from l2r.report.references import COUNTS, health_table, whole
from l2r.report.routing import certified_curves, usage_by_layer
from l2r.report.tables import Table
from l2r.report.verdicts import ever_first, of_checkpoints, span

_Fields = Mapping[str, str]  # column -> field
_Group = tuple[str, _Fields, str]  # title, columns and what they mean
_GROUPS: tuple[_Group, ...] = (
    (
        "Decisions and robustness",
        {
            "mean margin": "mean_margin",
            "margin / spread": "scale_free_margin",
            "low-margin rate": "low_margin_rate",
            "stability": "stability",
            "top-k overlap": "topk_overlap",
        },
        "Margins are gaps between the two largest logits. Raw gaps of different scorings are not "
        "comparable (they have different units); margin / spread divides each by the standard "
        "deviation of the token's logits over experts. Stability and overlap: under Gaussian "
        "noise on the router input.",
    ),
    (
        "Certified routing",
        {
            "top-1 radius": "certified_top1",
            "top-1 found": "found_top1",
            "top-1 tightness": "tightness_top1",
            "top-1 at noise norm": "certified_share_top1",
            "top-k radius": "certified_topk",
            "top-k found": "found_topk",
            "top-k tightness": "tightness_topk",
            "top-k at noise norm": "certified_share_topk",
        },
        "Median l2 radius of the router input inside which the first expert, or the chosen set, "
        "provably stays; found: smallest change that flips it, by adversarial search; the truth "
        "lies between. Tightness: mean of radius / found. At noise norm: share of tokens whose "
        "radius covers sigma sqrt(d), the usual norm of the stability test's noise.",
    ),
    (
        "Geometry, load and anchors",
        {
            "cosine variance": "cosine_variance",
            "load entropy": "entropy",
            "load cv": "cv",
            "max / mean": "max_over_mean",
            "MaxVio": "maxvio",
            "dead experts": "dead_experts",
            "ever first": "first_experts",
            "domain bits": "domain_information",
            "bits by chance": "domain_information_by_chance",
            "chance, 97.5%": "domain_information_by_chance_high",
            "effective heads": "effective_heads",
            "unused anchors": "unused_anchors",
            "anchor redundancy": "redundancy",
        },
        "Load entropy is 1 when all experts are used equally. MaxVio is max / mean less one. Ever "
        "first: experts that some token has as its first one. Dead and ever first: from the least "
        "of a layer to the most. Domain bits: mutual information "
        "between a token's domain and its experts; by chance: mean, and the end of 97.5%, of what "
        "the same choices show when the domains are permuted over whole sequences or images.",
    ),
    (
        "Worth, pairs and paths of experts",
        {
            "cross-entropy": "cross_entropy",
            "routing gain": "routing_gain",
            "shuffled gain": "shuffled_gain",
            "co-activation": "coactivation",
            "pairs by chance": "coactivation_by_chance",
            "bits between layers": "path_information",
            "path entropy": "path_entropy",
            "paths by chance": "path_entropy_by_chance",
            "distinct paths": "distinct_paths",
        },
        "Routing gain: rise of the cross-entropy with random experts; shuffled: with those of "
        "another token. Co-activation: how often an expert's most frequent partner is chosen with "
        "it. Bits between layers: what a layer's first expert tells of the next one's. Path "
        "entropy: bits of the path of first experts through all layers.",
    ),
    (
        "Specialization",
        {
            "domain share": "domain_specialization",
            "domain by chance": "domain_specialization_by_chance",
            "input word": "vocabulary_input",
            "input by chance": "vocabulary_input_by_chance",
            "next word": "vocabulary_next",
            "next by chance": "vocabulary_next_by_chance",
            "predicted word": "vocabulary_predicted",
            "predicted by chance": "vocabulary_predicted_by_chance",
            "margin of frequent words": "frequency_margin",
        },
        "Share of a domain's (top-k) or a word's tokens (top-1) that go to the expert they go to "
        "most. Margin of frequent words: rank correlation of a token's margin / spread and the "
        "occurrences of its word.",
    ),
)


_PLANE_KEY = Key(
    (
        (INK, "small dot: a token", "box"),
        (EXPERTS[0], "ringed dot: an anchor, in the color of its expert", "box"),
        (f"color-mix(in srgb, {EXPERTS[0]} 45%, transparent)", "area: the first expert", "box"),
    )
)
_SUMMARY = {
    "load entropy": "entropy",
    "margin / spread": "scale_free_margin",
    "stability": "stability",
    "routing gain": "routing_gain",
}


def checkpoint_tables(views: Mapping[str, Diagnosis]) -> list[Table]:
    """Decisions, certificates and load: a row per checkpoint, means over layers."""
    rows = {
        name: {field: whole(view, field) for field in view.numbers()}
        for name, view in views.items()
    }
    return [
        _table(f"{title} (mean over layers)", "checkpoint", rows, fields, caption)
        for title, fields, caption in _groups_of(rows)
    ]


def summary_table(views: Mapping[str, Diagnosis]) -> Table:
    """Table for a terminal: a row per checkpoint in six columns, the verdict above."""
    rows = []
    for name, view in views.items():
        numbers, experts = view.numbers(), len(view.array(0, "top1"))
        first = f"{span(ever_first(view))} of {experts}"
        rows.append((name, first, *(numbers.get(field) for field in _SUMMARY.values())))
    columns = ("checkpoint", "experts ever first", *_SUMMARY)
    return Table("", columns, tuple(rows), digits=3, verdict=of_checkpoints(views).says)


def full_table(views: Mapping[str, Diagnosis]) -> Table:
    """Every number of ``checkpoint_tables`` in one table, for programs."""
    fields = {column: field for _, group, _ in _GROUPS for column, field in group.items()}
    rows = {name: view.numbers() for name, view in views.items()}
    records = tuple((name, *(rows[name].get(f) for f in fields.values())) for name in rows)
    return Table("", ("checkpoint", *fields.values()), records)


def write_diagnosis(
    views: Mapping[str, Diagnosis],
    path: Path,
    *,
    texts: Mapping[str, TextRouting] | None = None,
    opening: Sequence[Section] = (),
) -> Path:
    """Write the page of one checkpoint or several side by side.

    First what came out, shown by ``texts`` or by the use of experts; then the sections ``opening``
    and the numbers beside their references; all else is folded.
    """
    use = usage_by_layer(views, "top1")
    sections = [
        *opening,
        Section("What is healthy?", parts=[health_table(views)]),
        *([Section("Experts as a first choice", USAGE_TEXT, [use])] if texts else []),
        *(dataclasses.replace(section, folded=True) for section in _details(views)),
    ]
    first = next(iter(views.values()))
    domains = ", ".join(map(str, first.info["domains"]))
    many = f"{len(views)} checkpoint{'s' * (len(views) > 1)}"
    return write_page(
        path,
        title=f"What the routers of {', '.join(views) if len(views) < 4 else many} do",
        summary=f"{many}, {first.info['tokens']:,} tokens{' each' * (len(views) > 1)}: {domains}.",
        sections=sections,
        verdict=of_checkpoints(views),
        lead=[first_passages(texts)] if texts else [use],
    )


def _details(views: Mapping[str, Diagnosis]) -> list[Section]:
    """Make the sections that are folded: every number and figure."""
    sections = [
        Section("All numbers", parts=checkpoint_tables(views)),
        *routing_sections(views),
        *_certified(views),
        *analysis_sections(views, details=True),
        Section(
            "Geometry",
            "Tokens of the first, middle and last layer on their two main axes, in the space of "
            "the router input x and of the routing query q; color is the first expert.",
            [cosine_variance_bars(views)],
        ),
        *(Section(f"Geometry of {name}", parts=_geometry(view)) for name, view in views.items()),
    ]
    for name, view in views.items():
        rows = {f"{view.label(i)} {row['name']}": _whole(row) for i, row in enumerate(view.layers)}
        tables = [_table(title, "layer", rows, fields, "") for title, fields, _ in _groups_of(rows)]
        why = {row["certificate"] for row in view.layers if "certificate" in row}  # there is none
        sections.append(Section(f"Layers of {name}", "; ".join(sorted(why)), tables))
    return [*sections, Section("What was read", _read(views))]


def _whole(row: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of a layer with its counts as whole numbers."""
    return {n: int(v) if n in COUNTS and v is not None else v for n, v in row.items()}


def _read(views: Mapping[str, Diagnosis]) -> str:
    first = next(iter(views.values()))
    return (
        f"{first.info['tokens']:,} tokens by each checkpoint; robustness on a uniform sample of "
        f"{first.info['sampled']:,}, certificates on its first "
        f"{first.info['settings']['certify']:,}. Checkpoints: {_sources(views)}. Data: "
        f"{', '.join(map(str, first.info['domains']))}; l2r-moe {_version()}."
    )


def _sources(views: Mapping[str, Diagnosis]) -> str:
    return ", ".join(f"`{view.info.get('checkpoint', name)}`" for name, view in views.items())


def _version() -> str:
    from l2r import __version__

    return __version__


def _groups_of(rows: Mapping[str, Mapping[str, Any]]) -> list[_Group]:
    """Return the groups of columns for which the rows have a number."""
    fields = set[str]().union(*rows.values())
    return [group for group in _GROUPS if any(field in fields for field in group[1].values())]


def _table(
    title: str,
    key: str,
    rows: Mapping[str, Mapping[str, Any]],
    fields: _Fields,
    caption: str,
) -> Table:
    present = {
        column: field
        for column, field in fields.items()
        if any(field in row for row in rows.values())
    }
    return Table(
        title,
        (key, *present),
        tuple(
            (name, *(row.get(field) for field in present.values())) for name, row in rows.items()
        ),
        caption=caption,
    )


def _certified(views: Mapping[str, Diagnosis]) -> list[Section]:
    certified = {name: view for name, view in views.items() if _is_certified(view)}
    return [Section("Certified routing", parts=[certified_curves(certified)])] if certified else []


def _is_certified(view: Diagnosis) -> bool:
    """Tell whether all layers have radii; infinite ones have no median among the means."""
    return all(f"{layer}.certified_top1" in view.arrays for layer in range(len(view.layers)))


def _geometry(view: Diagnosis) -> list[Any]:
    """Figures of queries and anchors in the first, the middle and the last layer."""
    chosen = view.few_layers()
    planes = [layer for layer in chosen if f"{layer}.plane_first" in view.arrays]
    drawn = [_PLANE_KEY, routing_planes(view, planes)] if planes else []
    return [pca_scatter(view, chosen), *drawn]
