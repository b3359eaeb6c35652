"""The few numbers and usage grids that a comparison of runs shows, from collected records."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from l2r.diagnostics import metrics
from l2r.diagnostics.collect import LayerRecord
from l2r.diagnostics.robustness import perturbation_stability


def summarise_routing(
    records: Sequence[LayerRecord],
    domains: Sequence[str],
    *,
    sigma: float = 0.02,
    seed: int = 0,
) -> dict[str, Any]:
    """Margins, robustness, balance and usage per layer as plain values.

    ``layers`` (a dictionary per layer), ``mean`` (over layers), ``usage`` (top1, topk,
    importance as [layer][expert]) and ``usage_by_domain`` (top-k share as domain ->
    [layer][expert]). Stability and overlap are measured on each record's sample of tokens.
    """
    layers: list[dict[str, Any]] = []
    for record in records:
        x = record.sample["x"].float().to(next(record.router.parameters()).device)
        robust = perturbation_stability(record.router, x, sigma=sigma, seed=seed)
        layers.append(
            {
                "name": record.name,
                **metrics.margin_from_sums(record.sums["margin"]),
                **{key: interval.mean for key, interval in robust.items()},
                **metrics.load_from_sums(record.sums["usage"]),
                "cosine_variance": metrics.cosine_variance_from_sums(record.sums["cosine"]),
            }
        )
    numbers = [key for key in layers[0] if key != "name"]
    used = [metrics.usage_from_sums(record.sums["usage"]) for record in records]
    return {
        "layers": layers,
        "mean": {key: sum(layer[key] for layer in layers) / len(layers) for key in numbers},
        "usage": {
            kind: [getattr(layer, kind).tolist() for layer in used]
            for kind in ("top1", "topk", "importance")
        },
        "usage_by_domain": {
            domain: [_shares(record.sums["domain"]["joint"][position]) for record in records]
            for position, domain in enumerate(domains)
        },
        "settings": {"sigma": sigma, "seed": seed},
    }


def _shares(counts: Tensor) -> list[float]:
    shares: list[float] = (counts / counts.sum().clamp_min(1)).tolist()
    return shares
