"""Every table and figure of the paper, from the folder in which its commands ran."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from l2r.errors import InputError
from l2r.files.atomic import make_folder, write_json
from l2r.files.diagnosis import Diagnosis
from l2r.files.folder import RunFolder
from l2r.files.shared_settings import PAPER_ROUTERS
from l2r.report.geometry import cosine_variance_bars, pca_panels
from l2r.report.page import Link, Section, write_page
from l2r.report.routing import usage_of_each
from l2r.report.style import layout
from l2r.report.tables import Table
from l2r_lab.report.curves import dynamics, line_panels, mean_curve
from l2r_lab.report.paper_sources import INFERENCE, PaperRouter, PaperSources
from l2r_lab.report.paper_tables import inference_table, show_count
from l2r_lab.report.task_accuracies import NOTES, accuracy_cell

Content = Any  # a Table or a figure of plotly
_TASKS = ("MMLU", "BoolQ", "HSwag", "PIQA", "SciQ", "Overall")
_GROUPS = ("Hum", "Other", "SocSci", "STEM")
_L2R = ("l2r_dot", "l2r_cosine", "l2r_sips")
_RANKS, _HEADS = (2, 8, 32), (1, 4, 8, 16, 64)
_VIT_HEADS = (1, 4, 8, 16)
_MARGINS = {"Mean Margin": "mean_margin", "Low-Margin Rate": "low_margin_rate"}
_ROBUST = {"Stability": "stability", "Top-k Overlap": "topk_overlap"}
_ONE_RUN = "A row is one run, one seed: nothing is marked best."


def _main(heads: int) -> dict[str, PaperRouter]:
    """Make the six routers of the main comparison; ``heads`` are those of L2R there."""
    return {
        kind: PaperRouter(name, kind, 2, heads) if kind in _L2R else PaperRouter(name, kind)
        for kind, name in PAPER_ROUTERS.items()
    }


def _sips(rank: int, heads: int) -> PaperRouter:
    return PaperRouter(f"L2R (SIPS), rank {rank}, H {heads}", "l2r_sips", rank, heads)


_SIX, _VIT = _main(16), _main(4)
_DOT_1 = PaperRouter("L2R (Dot)-H1", "l2r_dot", 2, 1)
_SIPS_1 = PaperRouter("L2R (SIPS)-H1", "l2r_sips", 2, 1)
_SIPS_16 = PaperRouter("L2R (SIPS)-H16", "l2r_sips", 2, 16)
_BY_RANK = {f"rank {rank}": _sips(rank, 4) for rank in _RANKS}
_BY_HEADS = {f"heads {heads}": _sips(2, heads) for heads in _HEADS}


@dataclass(frozen=True)
class Item:
    """A table or a figure: its name in the paper, what it shows, and how it is made."""

    name: str
    title: str
    make: Callable[[PaperSources], Content]

    @property
    def stem(self) -> str:
        """Name of its files: ``table-1``."""
        return self.name.lower().replace(" ", "-")


def write_items(
    items: Sequence[Item], sources: PaperSources, out: Path
) -> tuple[list[Item], dict[str, str]]:
    """Write a page and a JSON file for every item that can be made, and the page of all.

    Returns what was written, and why each of the others was not.
    """
    made, missing = {}, {}
    for item in items:
        try:
            made[item] = item.make(sources)
        except InputError as error:
            missing[item.name] = str(error)
    if made:
        make_folder(out)
    for item, content in made.items():
        section = Section(item.title[0].upper() + item.title[1:], parts=[content])
        write_page(out / f"{item.stem}.html", title=item.name, summary="", sections=[section])
        table = isinstance(content, Table)
        write_json(out / f"{item.stem}.json", content.records() if table else _plain(content))
    if made:
        links = [Link(f"{item.stem}.html", f"{item.name}: {item.title}") for item in made]
        lacking = Table("", ("missing", "why"), tuple(missing.items()))
        sections = [Section("Items", parts=links)]
        sections += [Section("Missing", parts=[lacking])] if missing else []
        summary = f"{len(made)} tables and figures of the paper; {len(missing)} are missing."
        write_page(out / "index.html", title="l2r: paper", summary=summary, sections=sections)
    return list(made), missing


def _plain(figure: go.Figure) -> Any:
    return json.loads(figure.to_json())


def items_of_runs() -> list[Item]:
    """Make the items that need a run or a measurement; the others are drawn without."""
    return [
        Item("Table 1", "overall performance", _main_results),
        Item("Table 2", "ablation on rank with H = 4", _rank_ablation),
        Item("Table 3", "ablation on heads with rank 2", _heads_ablation),
        _routing("Table 4", "routing diagnostics", _THREE, {**_MARGINS, **_ROBUST}),
        Item("Table 5", "ImageNet-1K with ViT-S", _imagenet),
        Item("Table 6", "rank and heads on ImageNet-1K", _imagenet_ablation),
        _routing("Table 7", "expert discrimination", (*_THREE, _SIPS_16), _MARGINS),
        _routing("Table 8", "robustness under perturbations", _FIVE, _ROBUST),
        Item("Table 10", "inference overhead", _inference),
        Item("Table 14", "downstream performance", _full_results),
        Item("Figure 2", "variance of pairwise token cosines", _cosine_variance),
        Item("Figure 4", "training dynamics", _dynamics),
        Item("Figure 5", "training dynamics of ablations", _ablation_curves),
        Item("Figure 6", "representation space", _representation),
        _usage("Figure 7", "expert usage", ("l2r_sips", "linear")),
        Item("Figure 9", "training dynamics by method, scoring, heads and rank", _all_dynamics),
        Item("Figure 10", "geometry of the linear router", _linear_geometry),
        Item("Figure 11", "geometry under L2R", _l2r_geometry),
        Item("Figure 12", "geometry under X-MoE", _xmoe_geometry),
        _usage("Figure 13", "expert usage of L2R", ("l2r_cosine", "l2r_dot", "l2r_sips")),
        _usage("Figure 14", "expert usage of Linear and X-MoE", ("linear", "xmoe")),
        _sweep_usage("Figure 15", "expert usage by heads, rank 2", _BY_HEADS),
        _sweep_usage("Figure 16", "expert usage by rank, H = 4", _BY_RANK),
    ]


_THREE = (_SIX["xmoe"], _DOT_1, _SIPS_1)
_FIVE = (_SIX["linear"], _SIX["linear_sips"], *_THREE)


def _accuracies(run: RunFolder, columns: Sequence[str]) -> tuple[str, ...]:
    """Accuracies of ``l2r eval`` with standard errors. Raises ValueError where one is missing."""
    record = run.read_json(run.evaluation)
    held = record.get("accuracy") or {}
    missing = [column for column in columns if held.get(column) is None]
    if missing:
        raise InputError(
            f"{run.path} has no accuracy of {', '.join(missing)}; l2r eval, or the sweep's "
            "--tasks, writes it"
        )
    return tuple(str(accuracy_cell(record, column)) for column in columns)


def _main_results(sources: PaperSources) -> Table:
    rows = [(router.name, *_accuracies(sources.language(router), _TASKS)) for router in _six()]
    return Table("", ("Method", *_TASKS), tuple(rows), f"{NOTES} {_ONE_RUN}")


def _six() -> list[PaperRouter]:
    return list(_SIX.values())


def _rank_ablation(sources: PaperSources) -> Table:
    rows = [
        (str(router.rank), *_accuracies(sources.language(router), _TASKS))
        for router in _BY_RANK.values()
    ]
    return Table("", ("Rank", *_TASKS), tuple(rows), f"{NOTES} {_ONE_RUN}")


def _heads_ablation(sources: PaperSources) -> Table:
    rows = []
    for router in _BY_HEADS.values():
        run = sources.language(router)
        facts = run.read_json(run.environment)
        own, linear = facts.get("router_parameters"), facts.get("linear_router_parameters")
        if not own or not linear:
            raise InputError(f"{run.environment} does not say how many parameters its routers have")
        accuracies = _accuracies(run, _TASKS)
        rows.append((str(router.heads), show_count(own, linear), *accuracies))
    caption = (
        f"Router parameters over all MoE layers, and their share of the linear router's. {NOTES}"
    )
    return Table("", ("H", "Router Params", *_TASKS), tuple(rows), f"{caption} {_ONE_RUN}")


def _full_results(sources: PaperSources) -> Table:
    """Return all rows of the paper's Table 14, Linear (SIPS) and H 64 besides."""
    first = [_SIX[kind] for kind in ("xmoe", "linear", "linear_sips", "l2r_cosine", "l2r_dot")]
    shapes = ((2, 16), (2, 64), (2, 8), (2, 4), (32, 4), (2, 1), (8, 4))
    columns = (*_GROUPS, *_TASKS)
    rows = []
    for router in (*first, *(_sips(*shape) for shape in shapes)):
        run = sources.language(router)
        recipe = run.read_recipe()["router"]
        size = (str(recipe.get(field, "none")) for field in ("heads", "rank"))
        name = PAPER_ROUTERS[router.kind]
        rows.append((name, *size, *_accuracies(run, columns)))
    caption = f"{NOTES} The paper's table is without Linear (SIPS) and H 64. {_ONE_RUN}"
    return Table("", ("Method", "H", "Rank", *columns), tuple(rows), caption)


def _routing(
    name: str, title: str, routers: Sequence[PaperRouter], fields: Mapping[str, str]
) -> Item:
    def make(sources: PaperSources) -> Table:
        rows = []
        for router in routers:
            numbers = sources.diagnosis(router).numbers()
            rows.append((router.name, *(numbers[field] for field in fields.values())))
        caption = (
            "Means over layers. Raw margins of different scorings have different units; "
            "l2r diagnose has them by the spread of the logits too."
        )
        return Table("", ("Model", *fields), tuple(rows), caption)

    return Item(name, title, make)


def _imagenet(sources: PaperSources) -> Table:
    rows, averaged = [], set()
    for router in (router for kind, router in _VIT.items() if kind != "linear_sips"):
        run = sources.images(router)
        record = run.read_json(run.evaluation)
        if "top1" not in record:
            raise InputError(f"{run.path} has no accuracy on images; l2r eval writes it")
        for option in ("data", "limit"):
            if record.get(option):
                raise InputError(
                    f"{run.evaluation} must be of all validation images of the run; it was made "
                    f"with --{option}: run l2r eval {run.path} again"
                )
        averaged.add(bool(record.get("averaged")))
        images = record["images"]
        shares = (record["top1"], record["top5"])
        rows.append((router.name, *(_share(share, images) for share in shares)))
    if len(averaged) > 1:
        raise InputError("evaluations must all be of averaged weights or none; got some with each")
    caption = f"± one standard error over images. {_ONE_RUN}"
    return Table("", ("Method", "Top-1 (%)", "Top-5 (%)"), tuple(rows), caption)


def _share(share: float, count: int) -> str:
    error = (share * (1 - share) / count) ** 0.5
    return f"{100 * share:.2f}±{100 * error:.2f}"


def _imagenet_ablation(sources: PaperSources) -> Table:
    ranks: list[tuple[Any, ...]] = [
        (str(rank), *_last_accuracies(sources, rank, 4)) for rank in _RANKS
    ]
    heads = [(str(heads), *_last_accuracies(sources, 2, heads)) for heads in _VIT_HEADS]
    ranks += [("", None, None)] * (len(heads) - len(ranks))
    rows = [(*rank, *head) for rank, head in zip(ranks, heads, strict=True)]
    columns = (
        *("r (H = 4)", "Top-1 (%), r", "Top-5 (%), r"),
        *("H (r = 2)", "Top-1 (%), H", "Top-5 (%), H"),
    )
    caption = f"Accuracies of the validation at the end of training. {_ONE_RUN}"
    return Table("", columns, tuple(rows), caption, digits=2)


def _last_accuracies(sources: PaperSources, rank: int, heads: int) -> tuple[float, float]:
    run = sources.images(_sips(rank, heads))
    last = (run.read_metrics("validation") or [{}])[-1]
    if "top1" not in last:
        raise InputError(f"{run.path} has no validation on record")
    return 100 * last["top1"], 100 * last["top5"]


def _inference(sources: PaperSources) -> Table:
    records = sources.json(INFERENCE, "l2r bench inference --out inference")["records"]
    if not records:
        raise InputError(f"{INFERENCE} has no records: our model was not equal to the stock one")
    return inference_table(records)


def _cosine_variance(sources: PaperSources) -> go.Figure:
    return cosine_variance_bars({router.name: sources.diagnosis(router) for router in _six()})


def _dynamics(sources: PaperSources) -> go.Figure:
    return dynamics({"": _runs(sources, {router.name: router for router in _six()})})


def _runs(sources: PaperSources, routers: Mapping[str, PaperRouter]) -> dict[str, RunFolder]:
    return {name: sources.language(router) for name, router in routers.items()}


def _ablation_curves(sources: PaperSources) -> go.Figure:
    content = []
    for title, routers in (
        ("(a) Varying rank with H = 4", _BY_RANK),
        ("(b) Varying heads with r = 2", _BY_HEADS),
    ):
        runs = _runs(sources, routers)
        lines = {n: mean_curve([r], "train_mean", "ce", "tokens") for n, r in runs.items()}
        content.append((title, "training cross-entropy (nats)", lines))
    figure, _ = line_panels(content, "tokens")
    for line in figure.data:
        line.update(legendgrouptitle_text=line.legendgroup)
    figure.update_layout(**layout(wide=1000))
    return figure


def _all_dynamics(sources: PaperSources) -> go.Figure:
    methods = ("linear", "linear_sips", "xmoe", "l2r_sips")
    groups = {
        "methods": {_SIX[kind].name: _SIX[kind] for kind in methods},
        "scoring": {_SIX[kind].name: _SIX[kind] for kind in _L2R},
        "heads, r = 2": _BY_HEADS,
        "rank, H = 4": _BY_RANK,
    }
    return dynamics({title: _runs(sources, routers) for title, routers in groups.items()})


def _geometry(rows: Sequence[tuple[PaperRouter, str]], sources: PaperSources) -> go.Figure:
    """Draw the first, middle and last layer of each router in a space, x or q."""
    panels = []
    for router, space in rows:
        view = sources.diagnosis(router)
        panels.append(
            [(f"{router.name}, {space}", view, layer, space) for layer in view.few_layers()]
        )
    return pca_panels(panels)


def _representation(sources: PaperSources) -> go.Figure:
    panels: list[tuple[str, Diagnosis, int, str]] = []
    for kind, space in (("linear", "x"), ("l2r_sips", "x"), ("l2r_sips", "q")):
        view = sources.diagnosis(_SIX[kind])
        panels.append((f"{_SIX[kind].name}, {space}", view, view.few_layers()[1], space))
    return pca_panels([panels])


def _linear_geometry(sources: PaperSources) -> go.Figure:
    return _geometry([(_SIX["linear"], "x")], sources)


def _l2r_geometry(sources: PaperSources) -> go.Figure:
    order = ("l2r_sips", "l2r_cosine", "l2r_dot")
    return _geometry([(_SIX[kind], space) for kind in order for space in "xq"], sources)


def _xmoe_geometry(sources: PaperSources) -> go.Figure:
    return _geometry([(_SIX["xmoe"], space) for space in "xq"], sources)


def _usage(name: str, title: str, kinds: Sequence[str]) -> Item:
    def make(sources: PaperSources) -> go.Figure:
        return usage_of_each({_SIX[kind].name: sources.diagnosis(_SIX[kind]) for kind in kinds})

    return Item(name, title, make)


def _sweep_usage(name: str, title: str, routers: Mapping[str, PaperRouter]) -> Item:
    def make(sources: PaperSources) -> go.Figure:
        return usage_of_each({n: sources.usage(router) for n, router in routers.items()})

    return Item(name, title, make)
