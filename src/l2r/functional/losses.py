"""Auxiliary losses of the router (paper, Section 3.5 and Appendix E), and a margin loss.

All functions take one layer ([T, N] logits, [T, K] indices) or a list of layers; a list gives
the mean over layers, except for ``variant="hf"`` (see there). ``mask`` [T] is true for tokens
that count: padding left out of the mask changes nothing. Sums are written as sums, never as
matrix products, which autocast would run in bf16.

Shape letters: T tokens, N experts, K experts chosen per token.
"""

import math
from collections.abc import Sequence
from typing import get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from l2r.files.shared_settings import BalanceVariant, ZVariant
from l2r.functional.selection import largest_logit, routing_probs

_VARIANCE_EPS = 1e-6  # added: at equal scores the gradient of the root of the variance is NaN


def expert_usage(
    indices: Int[Tensor, "T K"],
    num_experts: int,
    *,
    mask: Bool[Tensor, " T"] | None = None,
) -> Float[Tensor, " N"]:
    """Share of tokens that chose each expert, f_i of Eq. 33; the shares sum to K."""
    tokens = _token_weight(indices.shape[0], mask, indices.device).sum()
    return expert_counts(indices, num_experts, mask=mask).float() / tokens.clamp_min(1)


def expert_counts(
    indices: Int[Tensor, "T K"],
    num_experts: int,
    *,
    mask: Bool[Tensor, " T"] | None = None,
) -> Int[Tensor, " N"]:
    """Count the tokens that chose each expert, int64, so that sums of them are exact.

    ``mask`` is true for tokens that count.
    """
    weight = _token_weight(indices.shape[0], mask, indices.device).to(torch.int64)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=indices.device)
    return counts.scatter_add(0, indices.flatten(), weight.repeat_interleave(indices.shape[1]))


def dead_experts(load: Float[Tensor, " N"] | Int[Tensor, " N"]) -> int:
    """Count the experts without a token, of counts or shares of tokens [N]."""
    return int((load == 0).sum())


def peak_load(load: Float[Tensor, " N"] | Int[Tensor, " N"]) -> float:
    """Largest load over the mean load, of counts or shares of tokens [N]; 1 in balance."""
    wide = load.double()
    return float(wide.max() / wide.mean())


def mean_probs(
    logits: Float[Tensor, "T N"], *, mask: Bool[Tensor, " T"] | None = None
) -> Float[Tensor, " N"]:
    """Mean routing probability of each expert, s-bar_i of Eq. 33; the means sum to 1."""
    probs = routing_probs(_zero_masked(logits, mask))
    weight = _token_weight(logits.shape[0], mask, logits.device).to(probs.dtype)
    return (weight.unsqueeze(1) * probs).sum(0) / weight.sum().clamp_min(1)


def load_balancing_loss(
    logits: Tensor | Sequence[Tensor],
    indices: Tensor | Sequence[Tensor],
    *,
    variant: BalanceVariant | str = "paper",
    mask: Tensor | None = None,
    usage: Sequence[Tensor] | None = None,
) -> Float[Tensor, ""]:
    """Load-balancing loss, Eq. 34: N * sum_i s-bar_i * f_i.

    Variants (value when every expert is used equally; measured, with collapsed layers too, under
    "Eq. 34, four forms" in docs/paper-notes.md):

    - ``paper``: Eq. 34, per layer (K).
    - ``olmoe``: Eq. 34 divided by K, as OLMoE trains (1).
    - ``hf``: transformers pools s-bar and f over all layers before the product, so layers that
      each collapse onto different experts look balanced (K).
    - ``tutel``: f counts the first choice only, that of the largest logit, as GShard (1).

    ``usage`` replaces the f_i of every layer, for statistics over several ranks or
    micro-batches; gradients flow through s-bar alone either way.

    Layers may differ in N and K, but for ``hf``.

    Raises ValueError for an unknown variant, an empty list, lists of different length, and layers
    of different N with ``hf``.
    """
    layers = _layers(logits)
    chosen = _layers(indices)
    if variant not in get_args(BalanceVariant):
        allowed = ", ".join(get_args(BalanceVariant))
        raise ValueError(f"variant must be one of {allowed}; got {variant!r}")
    if not layers or len(layers) != len(chosen):
        raise ValueError(
            f"logits and indices must be lists of one length, at least 1; "
            f"got {len(layers)} and {len(chosen)}"
        )
    if variant == "tutel":
        chosen = list(map(largest_logit, layers, chosen))
    if mask is not None:
        mask = _flat_mask(mask, layers[0].shape[0])
    shares = [mean_probs(layer, mask=mask) for layer in layers]
    used = (
        [expert_usage(c, len(s), mask=mask) for c, s in zip(chosen, shares, strict=True)]
        if usage is None
        else list(usage)
    )
    if variant == "hf":
        sizes = sorted({len(share) for share in shares})
        if len(sizes) > 1:
            raise ValueError(
                f"variant='hf' pools layers, which must have one number of experts; got {sizes}"
            )
        shares, used = [mean_over_layers(shares)], [mean_over_layers(used)]
    losses = [len(s) * (s * f.to(s)).sum() for s, f in zip(shares, used, strict=True)]
    if variant == "olmoe":
        losses = [loss / c.shape[1] for loss, c in zip(losses, chosen, strict=True)]
    return mean_over_layers(losses)


def sequence_balance_loss(
    affinities: Tensor | Sequence[Tensor],
    indices: Tensor | Sequence[Tensor],
    sequences: Int[Tensor, " T"],
    *,
    mask: Tensor | None = None,
) -> Float[Tensor, ""]:
    r"""Sequence-wise balance loss of DeepSeek-V3 (arXiv 2412.19437, Eq. 17 to 20) with alpha = 1.

    Mean over sequences of sum_i f_i P_i, with f_i = N / (K S) times the tokens of a sequence of S
    that chose expert i, and P_i the mean of their normalized affinities: 1 where every sequence
    uses every expert equally, whatever K. ``affinities`` [T, N]: scores of the experts before a
    selection bias, normalized to sum to 1 (``Selection.affinities``). ``indices`` [T, K]: the
    experts that are counted, in Eq. 18 those of the K largest affinities, whatever a bias or groups
    choose. ``sequences`` [T]: the number
    of the sequence that each token is of, below T. A sequence without a token that counts is none.
    Gradients flow through P alone.

    Raises ValueError for lists of different length, and for a token without its number.
    """
    layers, chosen = _layers(affinities), _layers(indices)
    if not layers or len(layers) != len(chosen):
        raise ValueError(
            f"affinities and indices must be lists of one length, at least 1; "
            f"got {len(layers)} and {len(chosen)}"
        )
    if len(sequences) != layers[0].shape[0]:
        raise ValueError(
            f"sequences must have one number per token; got {len(sequences)} for "
            f"{layers[0].shape[0]}"
        )
    if mask is not None:
        mask = _flat_mask(mask, layers[0].shape[0])
    pairs = zip(layers, chosen, strict=True)
    return mean_over_layers([_sequence_loss(a, i, sequences, mask) for a, i in pairs])


def _sequence_loss(
    affinities: Tensor, indices: Tensor, sequences: Tensor, mask: Tensor | None
) -> Tensor:
    affinities = _zero_masked(affinities, mask)
    wide = affinities.to(torch.promote_types(affinities.dtype, torch.float32))
    sequences = sequences.to(wide.device)
    tokens, experts = wide.shape
    weight = _token_weight(tokens, mask, wide.device).to(wide.dtype)
    length = wide.new_zeros(tokens).index_add(0, sequences, weight)
    # A row for each number that there may be: to count them would wait for the device.
    sums = wide.new_zeros(tokens, experts).index_add(0, sequences, weight.unsqueeze(1) * wide)
    at = (sequences.unsqueeze(1) * experts + indices).flatten()
    counts = wide.new_zeros(tokens * experts)
    counts = counts.index_add(0, at, weight.repeat_interleave(indices.shape[1]))
    each = (counts.view(tokens, experts) * sums).sum(dim=1) / length.clamp_min(1).square()
    scaled = each.sum() * (experts / indices.shape[1])
    return scaled / (length > 0).sum().clamp_min(1)


def router_z_loss(
    logits: Tensor | Sequence[Tensor],
    *,
    variant: ZVariant | str = "paper",
    mask: Tensor | None = None,
    top_k: int | Sequence[int] | None = None,
    heads: int | Sequence[int] = 1,
) -> Float[Tensor, ""]:
    """Router z-loss, Eq. 35: mean over tokens of (log sum_i exp z_i)^2.

    ``olmoe`` divides by ``top_k``, as OLMoE's training code does. SIPS logits are bounded, so
    this loss has a floor near log(N H)^2 that no training removes; ``centered`` takes log(N H)
    from the logarithm before it is squared, with ``heads`` H anchors per expert. Both are one
    number or one per layer.

    Raises ValueError for an unknown variant, for ``olmoe`` without ``top_k``, or for ``heads`` or
    ``top_k`` that are not one per layer.
    """
    if variant not in get_args(ZVariant):
        raise ValueError(f"variant must be one of {', '.join(get_args(ZVariant))}; got {variant!r}")
    if variant == "olmoe" and top_k is None:
        raise ValueError("top_k is needed for variant='olmoe', which divides by it; got None")
    layers = _layers(logits)
    if mask is not None:
        mask = _flat_mask(mask, layers[0].shape[0])
    centers = [
        math.log(layer.shape[1] * h) if variant == "centered" else 0.0
        for layer, h in zip(layers, _per_layer("heads", heads, layers), strict=True)
    ]
    pairs = zip(layers, centers, strict=True)
    losses = [_z_loss(layer, mask, center) for layer, center in pairs]
    if variant == "olmoe" and top_k is not None:
        by_layer = _per_layer("top_k", top_k, layers)
        losses = [loss / k for loss, k in zip(losses, by_layer, strict=True)]
    return mean_over_layers(losses)


def router_margin_loss(
    ranking: Tensor | Sequence[Tensor],
    *,
    top_k: int | Sequence[int],
    gap: float = 0.1,
    mask: Tensor | None = None,
) -> Float[Tensor, ""]:
    r"""Margin loss: mean over tokens of max(0, 1 - (s_(k) - s_(k+1)) / (gap * sigma)).

    ``ranking`` [T, N]: what experts are selected by, the logits of most routers. s_(k) is the k-th
    largest of a token and sigma = sqrt(variance over experts + 1e-6). The loss is 1 where the
    k-th and the next expert are equally good and 0 from ``gap`` deviations on. Both parts scale
    with it, so that larger scores alone gain nothing. ``top_k``: one number or one per layer. Not
    in the paper.

    Raises ValueError for a ``top_k`` outside of 1 to N - 1 or not one per layer, and for a ``gap``
    that is not > 0.
    """
    layers = _layers(ranking)
    by_layer = _per_layer("top_k", top_k, layers)
    for layer, k in zip(layers, by_layer, strict=True):
        if not 1 <= k < layer.shape[1]:
            raise ValueError(
                f"top_k must be between 1 and {layer.shape[1] - 1} for a margin to the next "
                f"expert; got top_k={k}"
            )
    if not 0 < gap < math.inf:
        raise ValueError(f"gap must be > 0 and finite; got gap={gap}")
    if mask is not None:
        mask = _flat_mask(mask, layers[0].shape[0])
    pairs = zip(layers, by_layer, strict=True)
    return mean_over_layers([_margin_loss(layer, k, gap, mask) for layer, k in pairs])


def _margin_loss(ranking: Tensor, top_k: int, gap: float, mask: Tensor | None) -> Tensor:
    ranking = _zero_masked(ranking, mask)
    wide = ranking.to(torch.promote_types(ranking.dtype, torch.float32))
    best = wide.topk(top_k + 1, dim=-1).values
    sigma = (wide.var(dim=-1, correction=0) + _VARIANCE_EPS).sqrt()
    short = (1 - (best[:, top_k - 1] - best[:, top_k]) / (gap * sigma)).clamp_min(0)
    weight = _token_weight(ranking.shape[0], mask, ranking.device).to(short.dtype)
    return (weight * short).sum() / weight.sum().clamp_min(1)


def _z_loss(logits: Tensor, mask: Tensor | None, center: float) -> Tensor:
    logits = _zero_masked(logits, mask)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    level = torch.logsumexp(wide, dim=-1)
    squared = (level - center if center else level).square()
    weight = _token_weight(logits.shape[0], mask, logits.device).to(squared.dtype)
    return (weight * squared).sum() / weight.sum().clamp_min(1)


def _zero_masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits with 0 for masked tokens, whose NaN would reach the sum."""
    if mask is None:
        return logits
    return logits.masked_fill(~mask.to(logits.device).bool().unsqueeze(1), 0)


def _token_weight(tokens: int, mask: Tensor | None, device: torch.device) -> Tensor:
    if mask is None:
        return torch.ones(tokens, dtype=torch.float32, device=device)
    return mask.to(device, torch.float32)


def mean_over_layers(values: Sequence[Tensor]) -> Tensor:
    """Mean of a value of every layer, on the first one's device: layers may be on several."""
    return torch.stack([value.to(values[0].device) for value in values]).mean(0)


def _flat_mask(mask: Tensor, tokens: int) -> Tensor:
    """Mask [T] from a mask of any shape, e.g. an attention mask [B, S]."""
    if mask.numel() != tokens:
        raise ValueError(f"mask must have one entry per token; got {mask.numel()} for {tokens}")
    return mask.reshape(-1).bool()


def _per_layer(name: str, value: int | Sequence[int], layers: Sequence[Tensor]) -> list[int]:
    values = [value] * len(layers) if isinstance(value, int) else list(value)
    if len(values) != len(layers):
        raise ValueError(f"{name} must be one per layer; got {len(values)} for {len(layers)}")
    return values


def _layers(value: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)
