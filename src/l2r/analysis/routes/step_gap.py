"""A step's experts and log-probabilities beside those of the sampler that wrote its tokens.

    with capture(model) as captured:
        logits = model(tokens, attention_mask=mask).logits
    gap = route_gap(captured, routes, mask=answers, log_probs=now, sampled_log_probs=then)
    print(gap.scalars())

Shape letters: T tokens of all sequences, no padding among them, L layers, K experts per token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from l2r.errors import InputError
from l2r.hf.routes import NO_ROUTE, Routes
from l2r.routers import Captured
from l2r.routers.model_calls import ModelCall

PerCall = Tensor | Sequence[Tensor]  # of one call, or a list with one for each


@dataclass(frozen=True)
class RouteGap:
    """Differences between a sampler and a training step, over the tokens that are trained on.

    layers: indices of the blocks with a router. tokens: those that were compared; unknown: those
    without a route, such as the last that was sampled. changed: by layer, share of tokens with
    another set of experts; changed_in_some_layer: the same of tokens with one anywhere. kept: by
    layer, mean share of a token's experts that both took.

    log_prob_gap, largest_log_prob_gap: mean and largest of \\|log p here - log p there\\|;
    gap_where_changed, gap_where_kept: the mean of those whose log-probability comes from a token
    that took other experts in some layer, or the same in all. kl: mean of r - 1 - log r for the
    ratio r of probabilities, here over there, an estimate of KL(sampler, model) from its samples.
    NaN where there is nothing to average.
    """

    layers: tuple[int, ...]
    tokens: int
    unknown: int
    changed: tuple[float, ...]
    changed_in_some_layer: float
    kept: tuple[float, ...]
    log_prob_gap: float = float("nan")
    largest_log_prob_gap: float = float("nan")
    gap_where_changed: float = float("nan")
    gap_where_kept: float = float("nan")
    kl: float = float("nan")

    def scalars(self, prefix: str = "routes") -> dict[str, float]:
        """Flat names for a logger, by layer as PREFIX/NAME/layer-L; without what is NaN."""
        names = (
            "changed_in_some_layer", "log_prob_gap", "largest_log_prob_gap", "gap_where_changed",
            "gap_where_kept", "kl",
        )  # fmt: skip
        found = {f"{prefix}/{name}": getattr(self, name) for name in names}
        for name in ("changed", "kept"):
            values = getattr(self, name)
            found[f"{prefix}/{name}"] = sum(values) / len(values)
            for layer, value in zip(self.layers, values, strict=True):
                found[f"{prefix}/{name}/layer-{layer}"] = value
        return {name: value for name, value in found.items() if not math.isnan(value)}


@torch.no_grad()
def route_gap(
    captured: Captured,
    routes: Routes,
    *,
    mask: PerCall | None = None,
    log_probs: PerCall | None = None,
    sampled_log_probs: PerCall | None = None,
) -> RouteGap:
    """Compare what ``capture`` recorded of a step with the ``routes`` of its sampler.

    routes: of the step's sequences in their order, all tokens of each: ``routes.extended(1)``
    where the last was never forwarded, ``routes[order]`` for shuffled rows. Sequences are rows of
    padded batches, and packed documents by cumulative lengths or ``position_ids`` that start
    again. mask: tokens that are trained on; without it those that ``router_statistics`` counts.
    log_probs, sampled_log_probs: of each token, given those before it, from the model and from the
    sampler; NaN where unknown. Each of the three has a number for each token of a call, or is
    [rows, columns] of the last columns; a list where several calls were captured.

    Raises ValueError for routes of other sequences, layers, experts or k, for log-probabilities of
    one side alone and for tensors of other tokens.
    """
    if (log_probs is None) != (sampled_log_probs is None):
        missing = "log_probs" if log_probs is None else "sampled_log_probs"
        raise InputError(
            f"log_probs and sampled_log_probs must be given together; got no {missing}"
        )
    calls = captured.model_calls()
    experts = [_experts(captured, call, routes) for call in calls]
    parts = [_tokens(call, len(chosen)) for call, chosen in zip(calls, experts, strict=True)]
    _check_lengths(np.concatenate([part.lengths for part in parts]), routes)

    def of_tokens(name: str, values: PerCall, fill: float) -> Tensor:
        given = captured.by_call(name, values)
        triples = zip(calls, experts, parts, strict=True)
        return torch.cat([
            call.aligned(name, given[id(call)], len(chosen), fill).cpu()[part.places]
            for call, chosen, part in triples
        ])  # fmt: skip

    if mask is None:
        trained = torch.cat([part.trained for part in parts])
    else:
        trained = of_tokens("mask", mask, 0.0).bool()
    here = torch.cat([c[p.places] for c, p in zip(experts, parts, strict=True)])
    there, known = _dense(routes)
    shared = (here[..., None] == there[..., None, :]).any(-1).sum(-1)  # [T, L]
    changed, counted = shared < here.shape[-1], trained & known
    gap = RouteGap(
        layers=routes.layers,
        tokens=int(counted.sum()),
        unknown=int((trained & ~known).sum()),
        changed=tuple(changed[counted].double().mean(0).tolist()),
        changed_in_some_layer=_mean(changed.any(1)[counted]),
        kept=tuple((shared[counted].double() / here.shape[-1]).mean(0).tolist()),
    )
    if log_probs is None or sampled_log_probs is None:
        return gap
    first = torch.cat([part.first for part in parts])
    now = of_tokens("log_probs", log_probs, math.nan).double()
    then = of_tokens("sampled_log_probs", sampled_log_probs, math.nan).double()
    difference = now - then
    counted = trained & ~first & ~difference.isnan()
    before = torch.arange(len(first)) - 1  # the token whose forward gave a log-probability
    size, known, changed = difference.abs(), counted & known[before], changed.any(1)[before]
    return replace(
        gap,
        log_prob_gap=_mean(size[counted]),
        largest_log_prob_gap=float(size[counted].max()) if counted.any() else math.nan,
        gap_where_changed=_mean(size[known & changed]),
        gap_where_kept=_mean(size[known & ~changed]),
        kl=_mean((difference.exp() - 1 - difference)[counted]),
    )


class _Tokens(NamedTuple):
    """Tokens of a call that are no padding: places [T] among all, which are trained on, and which
    are the first of a sequence; and the lengths [S] of its sequences."""

    places: Int[Tensor, " T"]
    trained: Bool[Tensor, " T"]
    first: Bool[Tensor, " T"]
    lengths: Int[np.ndarray, " S"]


def _tokens(call: ModelCall, tokens: int) -> _Tokens:
    real, trained = call.real(tokens), call.trained(tokens)
    everything = torch.ones(tokens, dtype=torch.bool)
    places = (everything if real is None else real.cpu()).nonzero()[:, 0]
    documents = call.documents(tokens, torch.device("cpu"))[places]
    first = torch.ones(len(places), dtype=torch.bool)
    first[1:] = documents[1:] != documents[:-1]
    lengths = np.diff(first.nonzero()[:, 0].numpy(), append=len(places))
    return _Tokens(
        places, (everything if trained is None else trained.cpu())[places], first, lengths
    )


def _experts(captured: Captured, call: ModelCall, routes: Routes) -> Int[Tensor, "T L K"]:
    """Experts of a call of the model. Raises ValueError where the routes are of another."""
    found: dict[int, Tensor] = {}
    for name, calls in captured.calls.items():
        for seen, output in zip(calls, captured.outputs[name], strict=True):
            layer = captured.layers[name]
            if seen is call and found.setdefault(layer, output.indices) is not output.indices:
                raise InputError(
                    f"the router of layer {layer} was called twice in a call: a token has no "
                    "single route"
                )
            if output.logits.shape[-1] != (experts := routes.fingerprint.num_experts):
                raise InputError(
                    f"routes and model must have the same num_experts; got {experts} in the "
                    f"routes and {output.logits.shape[-1]} in layer {layer} of the model"
                )
    if (layers := tuple(sorted(found))) != routes.layers:
        raise InputError(
            f"routes and model must have the same layers; got {routes.layers} in the routes and "
            f"{layers} in the model"
        )
    chosen = torch.stack([found[layer].cpu() for layer in layers], dim=1)
    if chosen.shape[-1] != (k := routes.fingerprint.top_k):
        raise InputError(
            f"routes and model must have the same top_k; got {k} in the routes and "
            f"{chosen.shape[-1]} in the model"
        )
    return chosen


def _check_lengths(lengths: Int[np.ndarray, " S"], routes: Routes) -> None:
    wanted = routes.lengths[routes.lengths > 0]
    if np.array_equal(lengths, wanted):
        return
    late = len(lengths) == len(wanted) and (lengths == wanted + 1).all()
    hint = "; routes.extended(1) adds the last token, which no sampler forwards" if late else ""
    raise InputError(
        "routes must be of the sequences that were captured, all their tokens; their lengths are "
        f"{wanted.tolist()!s:.60} and those of the step {lengths.tolist()!s:.60}{hint}"
    )


def _dense(routes: Routes) -> tuple[Int[Tensor, "T L K"], Bool[Tensor, " T"]]:
    """Experts of all tokens, -1 where there is no route, and which tokens have one."""
    starts = np.cumsum(routes.lengths) - routes.lengths
    rows = torch.from_numpy(starts[routes.sequence_of_rows] + routes.positions)
    experts = torch.from_numpy(routes.experts.astype(np.int64))
    dense = experts.new_full((int(routes.lengths.sum()), *experts.shape[1:]), NO_ROUTE)
    dense[rows] = experts
    return dense, (dense != NO_ROUTE).all(-1).all(-1)


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else math.nan
