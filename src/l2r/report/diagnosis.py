"""The page and the tables of ``l2r diagnose``, from the folders that it writes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from l2r.report.analyses import analysis_sections, routing_sections
from l2r.report.geometry import cosine_variance_bars, pca_scatter, routing_planes
from l2r.report.page import Section, write_page
from l2r.report.routing import certified_curves
from l2r.report.tables import Table
from l2r.runs.diagnosis import Diagnosis

_Fields = Mapping[str, tuple[str, str | None]]  # column -> (field, which direction is better)
_Group = tuple[str, _Fields, str]  # title, columns and what they mean
_GROUPS: tuple[_Group, ...] = (
    (
        "Decisions and robustness",
        {
            "mean margin": ("mean_margin", None),
            "margin / spread": ("scale_free_margin", "max"),
            "low-margin rate": ("low_margin_rate", None),
            "stability": ("stability", "max"),
            "top-k overlap": ("topk_overlap", "max"),
        },
        "Margins are gaps between the two largest logits. Raw gaps of different scorings are not "
        "comparable (they have different units); margin / spread divides each by the standard "
        "deviation of the token's logits over experts. Stability and overlap: under Gaussian "
        "noise on the router input.",
    ),
    (
        "Certified routing",
        {
            "top-1 radius": ("certified_top1", "max"),
            "top-1 found": ("found_top1", None),
            "top-1 tightness": ("tightness_top1", None),
            "top-1 at noise norm": ("certified_share_top1", "max"),
            "top-k radius": ("certified_topk", "max"),
            "top-k found": ("found_topk", None),
            "top-k tightness": ("tightness_topk", None),
            "top-k at noise norm": ("certified_share_topk", "max"),
        },
        "Median l2 radius of the router input inside which the first expert, or the chosen set, "
        "provably stays; found: smallest change that flips it, by adversarial search; the truth "
        "lies between. Tightness: mean of radius / found. At noise norm: share of tokens whose "
        "radius covers sigma sqrt(d), the usual norm of the stability test's noise.",
    ),
    (
        "Geometry, load and anchors",
        {
            "cosine variance": ("cosine_variance", "max"),
            "load entropy": ("entropy", "max"),
            "load cv": ("cv", "min"),
            "max / mean": ("max_over_mean", "min"),
            "dead experts": ("dead_experts", "min"),
            "domain bits": ("domain_information", None),
            "bits by chance": ("domain_information_by_chance", None),
            "chance, 97.5%": ("domain_information_by_chance_high", None),
            "effective heads": ("effective_heads", None),
            "unused anchors": ("unused_anchors", None),
            "anchor redundancy": ("redundancy", None),
        },
        "Load entropy is 1 when all experts are used equally. Domain bits: mutual information "
        "between a token's domain and its experts; by chance: mean, and the end of 97.5%, of what "
        "the same choices show when the domains are dealt anew to whole sequences or images.",
    ),
    (
        "Worth, pairs and paths of experts",
        {
            "cross-entropy": ("cross_entropy", "min"),
            "routing gain": ("routing_gain", "max"),
            "shuffled gain": ("shuffled_gain", None),
            "co-activation": ("coactivation", None),
            "pairs by chance": ("coactivation_by_chance", None),
            "bits between layers": ("path_information", None),
            "path entropy": ("path_entropy", None),
            "paths by chance": ("path_entropy_by_chance", None),
            "distinct paths": ("distinct_paths", None),
        },
        "Routing gain: rise of the cross-entropy with random experts; shuffled: with those of "
        "another token. Co-activation: how often an expert's most frequent partner is chosen with "
        "it. Bits between layers: what a layer's first expert tells of the next one's. Path "
        "entropy: bits of the path of first experts through all layers.",
    ),
    (
        "Specialization",
        {
            "domain share": ("domain_specialization", None),
            "domain by chance": ("domain_specialization_by_chance", None),
            "input word": ("vocabulary_input", None),
            "input by chance": ("vocabulary_input_by_chance", None),
            "next word": ("vocabulary_next", None),
            "next by chance": ("vocabulary_next_by_chance", None),
            "predicted word": ("vocabulary_predicted", None),
            "predicted by chance": ("vocabulary_predicted_by_chance", None),
            "margin of frequent words": ("frequency_margin", None),
        },
        "Share of a domain's (top-k) or a word's tokens (top-1) that go to the expert they go to "
        "most. Margin of frequent words: rank correlation of a token's margin / spread and the "
        "occurrences of its word.",
    ),
)


def checkpoint_tables(views: Mapping[str, Diagnosis]) -> list[Table]:
    """Decisions, certificates and load: a row per checkpoint, means over layers."""
    rows = {name: view.numbers() for name, view in views.items()}
    return [
        _table(f"{title} (mean over layers)", "checkpoint", rows, fields, caption)
        for title, fields, caption in _groups_of(rows)
    ]


def full_table(views: Mapping[str, Diagnosis]) -> Table:
    """Every number of ``checkpoint_tables`` in one table, for programs."""
    fields = {column: field for _, group, _ in _GROUPS for column, field in group.items()}
    rows = {name: view.numbers() for name, view in views.items()}
    records = tuple((name, *(rows[name].get(f) for f, _ in fields.values())) for name in rows)
    return Table("", ("checkpoint", *(field for field, _ in fields.values())), records)


def write_diagnosis(
    views: Mapping[str, Diagnosis], path: Path, *, opening: Sequence[Section] = ()
) -> Path:
    """Write the page of one checkpoint or several side by side, after the sections ``opening``."""
    sections = [
        *opening,
        Section("Summary", parts=checkpoint_tables(views)),
        *_certified(views),
        Section(
            "Geometry",
            "Tokens of the first, middle and last layer on their two main axes, in the space of "
            "the router input x and of the routing query q; color is the first expert.",
            [cosine_variance_bars(views)],
        ),
        *(Section(f"Geometry of {name}", parts=_geometry(view)) for name, view in views.items()),
        *routing_sections(views),
        *analysis_sections(views, details=True),
    ]
    for name, view in views.items():
        rows = {f"{view.label(i)} {row['name']}": row for i, row in enumerate(view.layers)}
        tables = [_table(title, "layer", rows, fields, "") for title, fields, _ in _groups_of(rows)]
        why = {row["certificate"] for row in view.layers if "certificate" in row}  # there is none
        sections.append(Section(f"Layers of {name}", "; ".join(sorted(why)), tables))
    first = next(iter(views.values()))
    summary = (
        f"{len(views)} checkpoint(s), {first.info['tokens']:,} tokens each; robustness on a "
        f"uniform sample of {first.info['sampled']:,}, certificates on its first "
        f"{first.info['settings']['certify']:,}."
    )
    return write_page(path, title="l2r: what the routers do", summary=summary, sections=sections)


def _groups_of(rows: Mapping[str, Mapping[str, Any]]) -> list[_Group]:
    """Groups of which the rows have a number."""
    known = set[str]().union(*rows.values())
    return [group for group in _GROUPS if any(field in known for field, _ in group[1].values())]


def _table(
    title: str,
    key: str,
    rows: Mapping[str, Mapping[str, Any]],
    fields: _Fields,
    caption: str,
) -> Table:
    present = {
        column: field
        for column, (field, _) in fields.items()
        if any(field in row for row in rows.values())
    }
    best = tuple((column, fields[column][1] or "") for column in present if fields[column][1])
    return Table(
        title,
        (key, *present),
        tuple(
            (name, *(row.get(field) for field in present.values())) for name, row in rows.items()
        ),
        caption=caption,
        best=best if key == "checkpoint" else (),
    )


def _certified(views: Mapping[str, Diagnosis]) -> list[Section]:
    known = {name: view for name, view in views.items() if "certified_top1" in view.mean()}
    return [Section("Certified routing", parts=[certified_curves(known)])] if known else []


def _geometry(view: Diagnosis) -> list[Any]:
    """Of the first, the middle and the last layer."""
    chosen = view.few_layers()
    planes = [layer for layer in chosen if f"{layer}.plane_first" in view.arrays]
    return [pca_scatter(view, chosen), *([routing_planes(view, planes)] if planes else [])]
