"""Diagnosis from collected records: numbers per layer, and arrays for figures.

A diagnosis is plain data, whose files l2r.files.diagnosis reads and writes.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from l2r.analysis.certificates.attack import find_flip
from l2r.analysis.certificates.certify import certified_share, certify
from l2r.analysis.certificates.routing_map import radial_of, scoring_anchors
from l2r.analysis.diagnostics import metrics
from l2r.analysis.diagnostics.choice_log import Choices
from l2r.analysis.diagnostics.collect import LayerRecord
from l2r.analysis.diagnostics.robustness import perturbation_stability
from l2r.analysis.diagnostics.routing_gain import RoutingGain
from l2r.analysis.diagnostics.settings import DiagnosisSettings
from l2r.analysis.diagnostics.specialization import layer_analyses, model_analyses
from l2r.errors import InputError
from l2r.files.diagnosis import Diagnosis
from l2r.routers import L2RRouter, Router
from l2r.routers.observe import more_inputs

_GRID = 201  # points per axis of the routing plane
_SIDE_BY_SIDE = 4  # layers at a time, at most: each holds the gradients of its logits, [S, N, D]
_Measured = tuple[dict[str, Any], dict[str, Tensor]]


def diagnose_layers(
    records: Sequence[LayerRecord],
    *,
    domains: Sequence[str] = (),
    settings: DiagnosisSettings | None = None,
    choices: Choices | None = None,
    gain: RoutingGain | None = None,
    report: Callable[[int], None] = lambda layers_done: None,
) -> Diagnosis:
    """Metrics, robustness and certificates of every layer.

    Stability, Top-k Overlap, certificates and searches use the records' samples; what follows of
    single tokens (words, pairs, paths) those in ``choices``; all else is exact over all tokens.
    """
    chosen = settings or DiagnosisSettings()
    layers, arrays = [], {}
    measured = _side_by_side(partial(_measure, settings=chosen), records)
    for position, (record, (numbers, tensors)) in enumerate(zip(records, measured, strict=True)):
        layers.append({"name": record.name, **numbers})
        plain = {name: value.detach().cpu().numpy() for name, value in tensors.items()}
        if choices is not None:
            more, kept = layer_analyses(choices, position, chosen.least)
            layers[-1] |= more
            plain |= kept
        arrays.update({f"{position}.{name}": value for name, value in plain.items()})
        report(position + 1)
    info: dict[str, Any] = {
        "tokens": int(records[0].sums["margin"]["tokens"].item()),
        "sampled": len(records[0].sample["x"]),
        "experts": records[0].num_experts,
        "domains": list(domains),
        "settings": dataclasses.asdict(chosen),
        "model": {} if gain is None else gain.numbers(),
    }
    if choices is not None:
        numbers, info["paths"] = model_analyses(choices, layers)
        info["data"] = choices.data
        info["model"] |= numbers
    return Diagnosis(info, layers, arrays)


def _side_by_side(
    measure: Callable[[LayerRecord], _Measured], records: Sequence[LayerRecord]
) -> Iterator[_Measured]:
    """Measure the layers in their order, on a CPU several at a time with one thread each.

    Searches and certificates are many small operations, which more threads do not make faster.
    """
    threads, first = torch.get_num_threads(), next(records[0].router.parameters())
    workers = min(threads, len(records), _SIDE_BY_SIDE) if first.is_cpu else 1
    if workers == 1:
        yield from map(measure, records)
        return
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield from pool.map(measure, records)
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()  # which is a thread's own
def _measure(record: LayerRecord, settings: DiagnosisSettings) -> _Measured:
    router, x = record.router, record.inputs()
    numbers: dict[str, Any] = {
        **metrics.margin_from_sums(record.sums["margin"]),
        **metrics.load_from_sums(record.sums["usage"]),
        "cosine_variance": metrics.cosine_variance_from_sums(record.sums["cosine"]),
    }
    noise = (settings.sigma, settings.seed, settings.repeats)
    # a router that needs more of each token, such as its id, does not choose by its input
    alone = len(more_inputs(router)) <= len(record.more)
    inputs = record.as_passed()
    robust = perturbation_stability(router, inputs, *noise, more=record.more) if alone else {}
    for name, interval in robust.items():
        numbers[name] = interval.mean
        numbers[f"{name}_interval"] = [interval.low, interval.high]
    if "domain" in record.sums:
        told = metrics.domain_information_from_sums(record.sums["domain"])
        numbers["domain_information"] = told["mutual_information"]
        numbers["domain_information_share"] = told["normalized"]
        top_k = (record.sums["usage"]["topk"].sum() / record.sums["usage"]["tokens"]).item()
        numbers["domain_specialization"] = told["specialization"] * top_k
        for end in ("", "_low", "_high"):
            numbers[f"domain_information_by_chance{end}"] = told[f"by_chance{end}"]
            by_chance = f"specialization_by_chance{end}"
            numbers[f"domain_{by_chance}"] = told[by_chance] * top_k
    arrays: dict[str, Tensor] = metrics.usage_from_sums(record.sums["usage"])._asdict()
    if "domain" in record.sums:
        arrays["usage_by_domain"] = record.sums["domain"]["joint"]
    if isinstance(router, L2RRouter):
        wins = record.sums["anchors"]["anchor_wins"]
        numbers.update(metrics.anchor_metrics(wins, router.anchors.detach()))
    if settings.keep_sample:
        arrays.update(_sample_arrays(record, x.float()))
    if settings.certify > 0:
        numbers.update(_certificates(record, x, settings, arrays))
    return numbers, arrays


def _sample_arrays(record: LayerRecord, x: Tensor) -> dict[str, Tensor]:
    """Return the sampled tokens x [S, D], their queries, and the effective anchors."""
    router = record.router
    arrays = {f"sample_{name}": value for name, value in record.sample.items()}
    arrays["sample_x"] = x
    query = router.query(x) if isinstance(router, Router) else x
    if query is not x and query.data_ptr() != x.data_ptr():  # linear routers have no q
        arrays["sample_query"] = query.float()
    if isinstance(router, L2RRouter):
        arrays["anchor_wins"] = record.sums["anchors"]["anchor_wins"]
        arrays["anchors"] = router.anchors.float()
        if router.config.rank == 2:
            arrays.update(routing_plane(router, query.float().cpu()))
    return arrays


def _certificates(
    record: LayerRecord, x: Tensor, settings: DiagnosisSettings, arrays: dict[str, Tensor]
) -> dict[str, Any]:
    """Radii, the share of tokens they cover, and how near the search came to them.

    Empty for routers without a certificate; ``certificate`` then says why.
    """
    router, numbers = record.router, dict[str, Any]()
    tokens = x[: settings.certify]
    try:
        radii = certify(router, tokens)
    except InputError as error:
        return {"certificate": str(error)}
    for name, radius in (("top1", radii.top1), ("topk", radii.topk)):
        arrays[f"certified_{name}"] = radius
        numbers[f"certified_{name}"] = radius.median().item()
        numbers[f"certified_share_{name}"] = certified_share(radius, settings.sigma, x.shape[1])
        found = find_flip(router, tokens, top1=name == "top1")
        arrays[f"found_{name}"] = found
        ratio = (radius / found)[torch.isfinite(found) & (found > 0)]
        numbers[f"found_{name}"] = found.median().item()
        numbers[f"tightness_{name}"] = ratio.mean().item() if len(ratio) > 0 else None
    return numbers


def routing_plane(router: L2RRouter, query: Tensor) -> dict[str, Tensor]:
    """First expert on a grid of the routing plane: axes [G] each and labels [G, G] (y, x).

    The grid covers the anchors and 99.5% of the queries.
    """
    anchors = router.anchors.detach().float().flatten(0, 1).abs().amax()
    reach = max(anchors.item(), query.abs().flatten().quantile(0.995).item()) * 1.1
    axis = torch.linspace(-reach, reach, _GRID, dtype=torch.float64)
    points = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), dim=-1).view(-1, 2)
    rho = torch.linalg.vector_norm(points, dim=1, keepdim=True).clamp_min(router.config.eps)
    effective = radial_of(router).value(rho) * points / rho
    scores = torch.einsum("pr,nhr->pnh", effective, scoring_anchors(router).cpu())
    labels = torch.logsumexp(scores, dim=-1).argmax(dim=1)
    return {"plane_axis": axis.float(), "plane_first": labels.view(_GRID, _GRID).int()}
