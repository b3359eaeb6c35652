"""Patch routing: experts drawn over the image."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from l2r.errors import InputError
from l2r.files.arrays import PatchRouting
from l2r.files.diagnosis import block_number
from l2r.files.folder import RunFolder
from l2r.report.page import Link, Section, write_page
from l2r.report.style import expert_axis, layout
from l2r.report.verdicts import Verdict, span

_HOW_TO_READ = "Color: the expert with the largest weight. Point at a patch to see all its experts."
_TILE = 150  # pixels per drawn image


def patch_sections(runs: Sequence[RunFolder]) -> list[Section]:
    """Patches of one run layer by layer, of several by router; empty for language models."""
    routings = {r.name: PatchRouting.read(r.patches) for r in runs if r.patches.is_file()}
    if not routings:
        return []
    if len(routings) == 1:
        figure = patch_figure(next(iter(routings.values())))
        return [Section("Patches and experts", _HOW_TO_READ, [figure])]
    text = "The last layer with experts of every run. " + _HOW_TO_READ
    alike: list[dict[str, PatchRouting]] = []  # runs that were given the same images
    for name, routing in routings.items():
        for group in alike:
            if np.array_equal(next(iter(group.values())).images, routing.images):
                group[name] = routing
                break
        else:
            alike.append({name: routing})
    return [Section("Patches and experts", text, [compare_patches(group) for group in alike])]


def patch_links(pages: Sequence[Path], folder: Path) -> list[Section]:
    """Link a page in ``folder`` to the patches of its checkpoints, in a section."""
    links = [
        Link(page.relative_to(folder).as_posix(), f"Patches of {page.parent.name}")
        for page in pages
    ]
    return (
        [Section("Patches and experts", "The expert of every patch of a few images.", links)]
        if links
        else []
    )


def write_patch_page(folder: Path, routing: PatchRouting, model: str) -> Path:
    """patches.npz and patches.html of the images of one model in ``folder``."""
    routing.save(folder / "patches.npz")
    figure = patch_figure(routing, images=len(routing.images))
    section = Section("Patches and experts", _HOW_TO_READ, [figure])
    page = folder / "patches.html"
    first = routing.experts[..., 0].reshape(len(routing.layers), -1)
    used = span([len(np.unique(layer)) for layer in first])
    verdict = Verdict(
        f"The patches of {len(routing.images)} images go first to {used} of "
        f"{int(routing.num_experts)} experts by layer.",
        "What an expert does in other images: these are few, and taken in order.",
    )
    return write_page(page, title=folder.name, summary=model, sections=[section], verdict=verdict)


def patch_figure(routing: PatchRouting, *, images: int = 6) -> go.Figure:
    """Rows: images. Columns: the image, then every layer of one model."""
    panels = [(_short(str(name)), routing, layer) for layer, name in enumerate(routing.layers)]
    rows = [_row_title(routing, row) for row in range(min(images, len(routing.images)))]
    return _figure(panels, rows)


def compare_patches(routings: Mapping[str, PatchRouting], *, images: int = 6) -> go.Figure:
    """Rows: images. Columns: the image, then the last layer of every model.

    Raises ValueError when the models were not given the same images.
    """
    first = next(iter(routings.values()))
    if any(not np.array_equal(r.images, first.images) for r in routings.values()):
        raise InputError("patches can only be compared on the same images")
    panels = [(name, r, len(r.layers) - 1) for name, r in routings.items()]
    names = [_class_name(first, int(label)) for label in first.labels]
    return _figure(panels, names[:images])


def _figure(
    panels: Sequence[tuple[str, PatchRouting, int]], row_titles: Sequence[str]
) -> go.Figure:
    """Every patch in the color of its heaviest expert; pointing at it shows all and weights."""
    routing = panels[0][1]
    count = len(row_titles)
    figure = make_subplots(
        rows=count,
        cols=1 + len(panels),
        column_titles=["image", *(title for title, _, _ in panels)],
        horizontal_spacing=0.008,
        vertical_spacing=0.012,
    )
    for row, title in enumerate(row_titles):
        pixels = routing.images[row]
        source = _png(pixels)
        low, high = figure.get_subplot(row + 1, 1).yaxis.domain
        figure.add_annotation(
            text=title, x=0, y=(low + high) / 2, xref="paper", yref="paper", xanchor="right",
            xshift=-6, showarrow=False,
        )  # fmt: skip
        for column in range(1 + len(panels)):
            place = {"row": row + 1, "col": column + 1}
            figure.add_trace(go.Image(source=source, hoverinfo="skip"), **place)
            if column:
                _, drawn, layer = panels[column - 1]
                figure.add_trace(_overlay(drawn, layer, row, pixels.shape), **place)
    experts = max(int(r.num_experts) for _, r, _ in panels)
    figure.update_annotations(font_size=12)
    figure.update_xaxes(visible=False, constrain="domain")
    figure.update_yaxes(visible=False)
    figure.update_layout(
        layout(
            title="Which expert each patch goes to",
            height=110 + _TILE * count,
            width=260 + _TILE * (1 + len(panels)),
            coloraxis=expert_axis(experts, "expert", x=1.06),
            margin={"l": 110, "r": 40, "t": 80, "b": 20},
        )
    )
    return figure


def _overlay(routing: PatchRouting, layer: int, row: int, shape: tuple[int, ...]) -> go.Heatmap:
    experts, weights = routing.experts[layer, row], routing.weights[layer, row]
    down, across = experts.shape[:2]
    text = [
        [
            "<br>".join(
                f"expert {e}: {w:.3f}" for e, w in zip(experts[p, q], weights[p, q], strict=True)
            )
            for q in range(across)
        ]
        for p in range(down)
    ]
    # An image's pixel i covers [i - 0.5, i + 0.5]; patch centers follow from that.
    high, wide = shape[0] / down, shape[1] / across
    return go.Heatmap(
        z=experts[..., 0],
        x=(np.arange(across) + 0.5) * wide - 0.5,
        y=(np.arange(down) + 0.5) * high - 0.5,
        text=text,
        hovertemplate="%{text}<extra></extra>",
        coloraxis="coloraxis",
        opacity=0.85,  # near the colors of its scale
        xgap=1,
        ygap=1,
    )


def _png(pixels: np.ndarray) -> str:
    from PIL import Image

    stream = io.BytesIO()
    gray = pixels.shape[-1] == 1
    Image.fromarray(pixels[..., 0] if gray else pixels).convert("RGB").save(stream, format="PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _row_title(routing: PatchRouting, row: int) -> str:
    name = _class_name(routing, int(routing.labels[row]))
    guess = _class_name(routing, int(routing.predictions[row]))
    return name if guess == name else f"{name}<br>taken for {guess}"


def _class_name(routing: PatchRouting, label: int) -> str:
    return str(routing.classes[label])


def _short(name: str) -> str:
    """``vit.layers.8.mlp.router`` as ``layer 8``."""
    number = block_number(name)
    return f"layer {number}" if number else name
