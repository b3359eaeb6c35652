"""What the routers of a model do on validation tokens: the numbers a comparison shows."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from l2r.diagnostics import metrics, sums
from l2r.diagnostics.robustness import perturbation_stability
from l2r.routers import Router, capture

PROBED = 2048  # tokens per layer that stability under noise is measured on


@torch.no_grad()
def summarise_routing(
    model: nn.Module,
    batches: Iterable[dict[str, Any]],
    domains: tuple[str, ...],
    *,
    threshold: float = 0.2,
    sigma: float = 0.02,
    seed: int = 0,
) -> dict[str, Any]:
    """Margins, robustness, balance and usage per layer, streamed over ``batches``.

    A batch has ``domain`` [B] (a position in ``domains``; for images the class) and the model's
    arguments: ``input_ids`` [B, S] or ``pixel_values`` [B, C, H, W]. Returns plain values:
    ``layers`` (a dictionary per layer), ``mean`` (over layers), ``usage`` (top1, topk,
    importance as [layer][expert]) and ``usage_by_domain`` (top-k share as domain ->
    [layer][expert]).
    """
    model.eval()
    routers = {name: m for name, m in model.named_modules() if isinstance(m, Router)}
    totals: dict[str, sums.Sums] = {name: {} for name in routers}
    probes: dict[str, list[Tensor]] = {name: [] for name in routers}
    for batch in batches:
        domain = batch["domain"]
        with capture(model, inputs=True) as captured:
            model(**{name: value for name, value in batch.items() if name != "domain"})
        for name, router in routers.items():
            logits, weights, indices = captured.outputs[name][0]
            x = captured.inputs[name][0].reshape(-1, router.hidden_size)
            total, experts = totals[name], router.num_experts
            token_domain = domain.repeat_interleave(len(logits) // len(domain))
            _add(total, "margin", sums.margin_sums(logits, threshold))
            _add(total, "usage", sums.usage_sums(indices, weights, experts))
            _add(total, "cosine", sums.cosine_sums(router.query(x)))
            joint = sums.domain_sums(indices, token_domain, experts, len(domains))
            _add(total, "domain", joint)
            missing = PROBED - sum(len(part) for part in probes[name])
            if missing > 0:
                stride = max(1, len(x) * 4 // PROBED)  # several batches, so several domains
                probes[name].append(x[::stride][:missing])
    layers = []
    for name, router in routers.items():
        total = totals[name]
        robust = perturbation_stability(router, torch.cat(probes[name]), sigma=sigma, seed=seed)
        layers.append(
            {
                "name": name,
                **metrics.margin_from_sums(_part(total, "margin")),
                **{key: interval.mean for key, interval in robust.items()},
                **metrics.load_from_sums(_part(total, "usage")),
                "cosine_variance": metrics.cosine_variance_from_sums(_part(total, "cosine")),
            }
        )
    numbers = [key for key in layers[0] if key != "name"]
    used = [metrics.usage_from_sums(_part(total, "usage")) for total in totals.values()]
    joint_counts = [total["domain.joint"] for total in totals.values()]
    return {
        "layers": layers,
        "mean": {key: sum(layer[key] for layer in layers) / len(layers) for key in numbers},
        "usage": {
            kind: [getattr(layer, kind).tolist() for layer in used]
            for kind in ("top1", "topk", "importance")
        },
        "usage_by_domain": {
            domain: [_shares(counts[position]) for counts in joint_counts]
            for position, domain in enumerate(domains)
        },
        "settings": {"threshold": threshold, "sigma": sigma, "seed": seed},
    }


def _shares(counts: Tensor) -> list[float]:
    shares: list[float] = (counts / counts.sum().clamp_min(1)).tolist()
    return shares


def _add(total: sums.Sums, prefix: str, part: sums.Sums) -> None:
    sums.add(total, {f"{prefix}.{name}": value for name, value in part.items()})


def _part(total: sums.Sums, prefix: str) -> sums.Sums:
    start = f"{prefix}."
    return {n.removeprefix(start): v for n, v in total.items() if n.startswith(start)}
