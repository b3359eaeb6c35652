"""From collected records to a diagnosis: numbers per layer, and arrays for figures.

A diagnosis is plain data, saved as ``diagnosis.json`` and ``diagnosis.safetensors`` (schema in
docs/diagnostics.md).
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from l2r.data.atomic import write_bytes, write_json
from l2r.diagnostics import metrics
from l2r.diagnostics.attack import find_flip
from l2r.diagnostics.certify import certified_share, certify
from l2r.diagnostics.collect import LayerRecord
from l2r.diagnostics.robustness import perturbation_stability
from l2r.diagnostics.routing_map import radial_of, scoring_anchors
from l2r.routers import L2RRouter, Router

SCHEMA = 1
_GRID = 201  # points per axis of the routing plane


@dataclasses.dataclass(frozen=True)
class Settings:
    """sigma: noise on router inputs, drawn ``repeats`` times from ``seed``.

    certify: tokens of the sample that get a certified radius and a search for a flip; 0 for none.
    """

    sigma: float = 0.02
    repeats: int = 5
    seed: int = 0
    certify: int = 128


@dataclasses.dataclass
class Diagnosis:
    """layers: numbers of each layer, with ``name``. arrays: ``<layer>.<name>`` -> tensor.

    info: domains, tokens, settings, and what the caller adds (the checkpoint's name).
    """

    info: dict[str, Any]
    layers: list[dict[str, Any]]
    arrays: dict[str, Tensor]

    def mean(self) -> dict[str, float]:
        """Mean over layers of every number that all layers have."""
        first = self.layers[0]
        names = [n for n in first if isinstance(first[n], float)]
        shared = [n for n in names if all(isinstance(row.get(n), float) for row in self.layers)]
        return {n: sum(row[n] for row in self.layers) / len(self.layers) for n in shared}

    def layer(self, position: int) -> dict[str, Tensor]:
        """Arrays of one layer by name."""
        start = f"{position}."
        return {n.removeprefix(start): v for n, v in self.arrays.items() if n.startswith(start)}

    def save(self, folder: Path) -> None:
        """Write both files, each under a temporary name first."""
        tensors = save({name: value.contiguous() for name, value in self.arrays.items()})
        write_bytes(folder / "diagnosis.safetensors", tensors)
        text = {"schema": SCHEMA, "info": self.info, "layers": self.layers, "mean": self.mean()}
        write_json(folder / "diagnosis.json", text)


@torch.no_grad()
def diagnose(
    records: Sequence[LayerRecord],
    *,
    domains: Sequence[str] = (),
    settings: Settings | None = None,
    report: Callable[[int], None] = lambda layers_done: None,
) -> Diagnosis:
    """Metrics, robustness and certificates of every layer.

    Stability, Top-k Overlap, certificates and searches use the records' samples; all else is
    exact over all tokens.
    """
    chosen = settings or Settings()
    layers, arrays = [], {}
    for position, record in enumerate(records):
        numbers, tensors = _measure(record, chosen)
        layers.append({"name": record.name, **numbers})
        arrays.update({f"{position}.{name}": value for name, value in tensors.items()})
        report(position + 1)
    info = {
        "tokens": int(records[0].sums["margin"]["tokens"].item()),
        "sampled": len(records[0].sample["x"]),
        "experts": records[0].num_experts,
        "domains": list(domains),
        "settings": dataclasses.asdict(chosen),
    }
    return Diagnosis(info, layers, arrays)


def _measure(record: LayerRecord, settings: Settings) -> tuple[dict[str, Any], dict[str, Tensor]]:
    router, collected = record.router, record.sample
    device = next(router.parameters()).device
    x = collected["x"].to(device)
    wide = x.float()
    numbers: dict[str, Any] = {
        **metrics.margin_from_sums(record.sums["margin"]),
        **metrics.load_from_sums(record.sums["usage"]),
        "cosine_variance": metrics.cosine_variance_from_sums(record.sums["cosine"]),
    }
    robust = perturbation_stability(router, x, settings.sigma, settings.seed, settings.repeats)
    for name, interval in robust.items():
        numbers[name] = interval.mean
        numbers[f"{name}_interval"] = [interval.low, interval.high]
    if "domain" in record.sums:
        told = metrics.domain_information_from_sums(record.sums["domain"])
        numbers["domain_information"] = told["mutual_information"]
        numbers["domain_information_share"] = told["normalised"]
        for end in ("", "_low", "_high"):
            numbers[f"domain_information_by_chance{end}"] = told[f"by_chance{end}"]
    used = metrics.usage_from_sums(record.sums["usage"])
    arrays = {
        **used._asdict(),
        "sample_x": wide.cpu(),
        "sample_first": collected["first"],
        **({"sample_domain": collected["domain"]} if "domain" in collected else {}),
    }
    if "domain" in record.sums:
        arrays["usage_by_domain"] = record.sums["domain"]["joint"]
    query = router.query(wide) if isinstance(router, Router) else wide
    if query is not wide and query.data_ptr() != wide.data_ptr():  # linear routers have no q
        arrays["sample_query"] = query.float()
    if isinstance(router, L2RRouter):
        wins = record.sums["anchors"]["anchor_wins"]
        numbers.update(metrics.anchor_metrics(wins, router.anchors.detach()))
        arrays["anchor_wins"] = wins
        arrays["anchors"] = router.anchors.detach().float()
        if router.config.rank == 2:
            arrays.update(routing_plane(router, query.float().cpu()))
    if settings.certify > 0:
        numbers.update(_certificates(record, wide, settings, arrays))
    return numbers, {name: value.detach().cpu() for name, value in arrays.items()}


def _certificates(
    record: LayerRecord, x: Tensor, settings: Settings, arrays: dict[str, Tensor]
) -> dict[str, Any]:
    """Radii, the share of tokens they cover, and how near the search came to them.

    Empty for routers without a certificate; ``certificate`` then says why.
    """
    router, numbers = record.router, dict[str, Any]()
    tokens = x[: settings.certify]
    try:
        radii = certify(router, tokens)
    except ValueError as error:
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
