"""What routers cost at sizes nobody runs yet: arithmetic, bytes, copies, share of a layer.

A layer here has K = 8 of N experts of width D / 2 (OLMoE's proportions), four attention matrices
and 4,096 tokens of context; more experts change what is stored, not what a token computes. It runs
on 64 GPUs with its experts split over all of them (EP), every GPU with tokens of its own, or on 8
that split every matrix (TP) and share their tokens. The router is whole on every GPU either way.
Routers compute in fp32, as ours do, experts and attention in bf16. Time is the longer of
arithmetic at the stated rate and bytes at the stated bandwidth; launches and what travels between
GPUs are left out.

    python scripts/machines/router_scale.py --gpu h100 --out results/plan --figure router-scale.html

Prints the table, writes router-scale.md and the figure (.html, or .png where kaleido finds Chrome).
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from l2r.report.style import layout, line_style
from l2r.report.tables import Table
from l2r.routers.count import router_cost, router_parameters
from l2r_lab.planning.cut import GPUS, Gpu, find_gpu

ROUTERS: dict[str, dict[str, int]] = {
    "linear": {},
    "xmoe": {},
    "l2r_sips": {"rank": 2, "heads": 16},
}
EXPERTS = (64, 256, 1024, 4096)
HIDDEN = (2048, 4096, 8192, 16384)
TOP_K, CONTEXT = 8, 4096
EP, TP = 64, 8  # GPUs
# name -> title, form, tokens of one forward on one GPU
PHASES = {
    "prefill_ep": ("prefill, EP", EP, 4096),
    "prefill_tp": ("prefill, TP", TP, 4096),
    "decode_ep": ("decode, EP, 64 tokens per GPU", EP, 64),
    "decode_tp": ("decode, TP, 1 token", TP, 1),
}
# An exponential takes a special unit as long as 16 fp32 operations take the others; SIPS has four
# more of those per anchor.
_PER_ANCHOR = 20


def router_scale(gpu: Gpu) -> list[dict[str, Any]]:
    """A record per hidden size, number of experts and router; shares in per cent."""
    records = []
    for hidden in HIDDEN:
        for experts in EXPERTS:
            for kind, options in ROUTERS.items():
                sizes = {"hidden_size": hidden, "num_experts": experts, **options}
                weights = 4 * router_parameters(kind, **sizes)
                flops = 2 * router_cost(kind, **sizes)
                scalars = _PER_ANCHOR * experts * options.get("heads", 1)

                records.append(
                    {
                        "hidden": hidden,
                        "experts": experts,
                        "router": kind,
                        "flops": flops,
                        "bytes": weights,
                        "copies": EP * weights,
                        **{
                            phase: _share(
                                gpu, form, tokens, hidden, experts, flops + scalars, weights
                            )
                            for phase, (_, form, tokens) in PHASES.items()
                        },
                    }
                )
    return records


def _share(
    gpu: Gpu, form: int, tokens: int, hidden: int, experts: int, flops: int, weights: int
) -> float:
    own = router_seconds(gpu, tokens, hidden, experts, flops, weights)
    return 100 * own / (own + layer_seconds(gpu, form, tokens, hidden, experts))


def router_seconds(
    gpu: Gpu, tokens: int, hidden: int, experts: int, flops: int, weights: int
) -> float:
    """One router: fp32 arithmetic, or its weights, the tokens and two passes over the logits."""
    moved = weights + 2 * tokens * hidden + 8 * tokens * experts
    return max(tokens * flops / gpu.wide_flops, moved / gpu.bandwidth)


def layer_seconds(gpu: Gpu, form: int, tokens: int, hidden: int, experts: int) -> float:
    """Attention and experts on one GPU; it reads those of its experts that some token chose."""
    expert = 3 * hidden * (hidden // 2)
    attention: float = 4 * hidden**2
    cache: float = 4 * CONTEXT * hidden * (tokens if tokens < CONTEXT else 1)
    flops = tokens * (2 * (TOP_K * expert + attention) + 2 * CONTEXT * hidden)
    together = tokens * form if form == EP else tokens
    met = experts * (1 - (1 - TOP_K / experts) ** together) * expert / form
    if form == TP:
        flops, attention, cache = flops / TP, attention / TP, cache / TP
    return max(flops / gpu.flops, (2 * (met + attention) + cache) / gpu.bandwidth)


def router_scale_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """Routers over N and d: arithmetic, bytes, copies, and their share of a layer."""
    columns = (
        "d", "N", "router", "MFLOP per token", "weights MB", "copies on 64 GPUs, MB",
        *(f"{title} (%)" for title, _, _ in PHASES.values()),
    )  # fmt: skip
    rows = tuple(
        (
            *(r["hidden"], r["experts"], r["router"], r["flops"] / 1e6, r["bytes"] / 1e6),
            *(r["copies"] / 1e6, *(r[phase] for phase in PHASES)),
        )
        for r in records
    )
    return Table("Routers at scale", columns, rows, digits=2)


def router_scale_figure(records: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Share of a layer's time against N, for prefill and decode, a line per router and d."""
    titles = [title for title, _, _ in PHASES.values()]
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, shared_yaxes=True)
    routers = list(dict.fromkeys(r["router"] for r in records))
    widths = sorted({r["hidden"] for r in records})
    for place, phase in enumerate(PHASES):
        for position, router in enumerate(routers):
            for hidden, dash in zip(widths, ("solid", "dash", "dot", "dashdot"), strict=False):
                points = [r for r in records if (r["router"], r["hidden"]) == (router, hidden)]
                figure.add_scatter(
                    x=[r["experts"] for r in points],
                    y=[r[phase] for r in points],
                    name=f"{router}, d = {hidden:,}",
                    line={**line_style(router, position), "dash": dash},
                    showlegend=place == 0,
                    col=place % 2 + 1,
                    row=place // 2 + 1,
                )
    figure.update_xaxes(type="log", title="experts N", tickvals=[64, 256, 1024, 4096])
    figure.update_yaxes(type="log", dtick=1, exponentformat="none")
    figure.update_yaxes(title="router's share of a layer's time (%)", col=1)
    figure.update_layout(**layout(height=760, width=1100))
    return figure


def main() -> None:
    """Print the table, save it and the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", default="h100", choices=list(GPUS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    records = router_scale(find_gpu(given.gpu))
    table = router_scale_table(records)
    print(table.to_markdown())
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "router-scale.md").write_text(table.to_markdown())
    if given.figure is not None:
        figure = router_scale_figure(records)
        write = figure.write_html if given.figure.suffix == ".html" else figure.write_image
        write(given.figure)


if __name__ == "__main__":
    main()
