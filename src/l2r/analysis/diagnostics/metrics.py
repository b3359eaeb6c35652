"""Metrics of routing decisions (paper, Sections 3.2 and 4.1, Appendix A), from tensors alone.

The ``*_from_sums`` functions take sums that were streamed over batches, exact over all tokens
(streaming_sums.py); the two without it are the paper's metrics of tokens at hand.

Shape letters: T tokens, N experts, K experts chosen per token, R size of a query, H anchors
per expert.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from l2r.analysis.diagnostics.streaming_sums import Sums, cosine_sums, margin_sums
from l2r.functional import dead_experts, peak_load
from l2r.stats.entropy import entropy, information, normalized_entropy

PERMUTATIONS = 200


def margin_metrics(logits: Float[Tensor, "T N"], threshold: float = 0.2) -> dict[str, float]:
    """Mean Margin and Low-Margin Rate (paper, Appendix A.1), and a margin without a scale.

    mean_margin: mean gap between the two largest logits. low_margin_rate: share of tokens with
    a gap below ``threshold``. scale_free_margin: mean of the gap divided by the standard
    deviation of the token's logits over experts; raw gaps of different scorings cannot be
    compared, this can. logit_spread: mean of that deviation.

    Raises ValueError for fewer than two experts or no tokens.
    """
    if logits.shape[1] < 2:
        raise ValueError(f"a margin needs num_experts >= 2; got {logits.shape[1]}")
    return margin_from_sums(margin_sums(logits, threshold))


def margin_from_sums(sums: Sums) -> dict[str, float]:
    """``margin_metrics`` from streamed sums."""
    tokens = _count(sums)
    return {
        "mean_margin": sums["margin"].item() / tokens,
        "low_margin_rate": sums["low_margin"].item() / tokens,
        "scale_free_margin": sums["scale_free_margin"].item() / tokens,
        "logit_spread": sums["logit_spread"].item() / tokens,
    }


class Usage(NamedTuple):
    """Use of each expert [N]: share of tokens that chose it first, that chose it among their k
    (sums to K), and its mean routing weight per token (0 where it was not chosen)."""

    top1: Float[Tensor, " N"]
    topk: Float[Tensor, " N"]
    importance: Float[Tensor, " N"]


def usage_from_sums(sums: Sums) -> Usage:
    """Top-1 frequency, top-k frequency and importance of every expert (paper, Figure 7)."""
    tokens = _count(sums)
    return Usage(sums["top1"] / tokens, sums["topk"] / tokens, sums["importance"] / tokens)


def load_from_sums(sums: Sums) -> dict[str, float]:
    """Balance of the load (assignments per expert over all k choices), and size of the weights.

    entropy: of the shares, divided by log N (1 is perfect balance, 0 one expert). cv: standard
    deviation over mean. max_over_mean and min_over_mean: of the load. maxvio: max_over_mean less
    one (MaxVio, arXiv 2408.15664). dead_experts: number without a token. importance_entropy and
    importance_cv say the same of the summed routing weights. first_experts: number that some token
    chose first. weight_sum: of a token's k
    weights, mean (1 where they are normalized).
    """
    tokens = _count(sums)
    load, importance = sums["topk"], sums["importance"]
    mean = load.mean()
    return {
        "entropy": normalized_entropy(load.cpu().numpy()),
        "cv": _cv(load),
        "max_over_mean": peak_load(load),
        "maxvio": peak_load(load) - 1,
        "min_over_mean": (load.min() / mean).item(),
        "dead_experts": float(dead_experts(load)),
        "importance_entropy": normalized_entropy(importance.cpu().numpy()),
        "importance_cv": _cv(importance),
        "first_experts": float((sums["top1"] > 0).sum()),
        "weight_sum": importance.sum().item() / tokens,
    }


def pairwise_cosine_variance(vectors: Float[Tensor, "T R"]) -> float:
    """Variance of the cosine over all pairs of different tokens (paper, Figure 2).

    Exact, in O(T R + R^2) memory: with unit vectors u, the sum of cosines over ordered pairs is
    |sum u|^2 - T and that of squared cosines is |sum u u^T|_F^2 - T. Population variance; 0.5
    for directions spread evenly in two dimensions, 1 / R in R dimensions.

    Raises ValueError for fewer than two tokens.
    """
    return cosine_variance_from_sums(cosine_sums(vectors))


def cosine_variance_from_sums(sums: Sums) -> float:
    """``pairwise_cosine_variance`` from streamed sums."""
    tokens = _count(sums)
    if tokens < 2:
        raise ValueError("pairwise cosines need at least 2 tokens; got 1")
    pairs = tokens * (tokens - 1)
    mean = (sums["unit"].square().sum() - sums["own"]) / pairs
    mean_square = (sums["gram"].square().sum() - sums["own_squared"]) / pairs
    return max(0.0, (mean_square - mean.square()).item())


def domain_information_from_sums(sums: Sums) -> dict[str, float]:
    """Mutual information between the domain of a token and the experts that it chose.

    mutual_information in bits, counted over all T K assignments. normalized: divided by the
    entropy of the domains (0: experts carry none, 1: they determine the domain; 0 for one domain).
    specialization: the largest share that one expert has of a domain's assignments, mean over
    domains (OLMoE's domain specialization, over k).
    by_chance: what the same choices show when domains are permuted over whole rows (sequences
    or images), a mean of PERMUTATIONS; by_chance_low and by_chance_high hold 95% of them. Tokens
    of a row and the k choices of a token depend on each other, so chance is far above what
    independent choices would show.
    """
    joint = sums["joint"].cpu()
    if joint.sum().item() <= 0:
        raise ValueError("expert-domain information needs at least 1 token; got 0")
    bits, share = _bits(joint), _largest_share(joint)
    domain_entropy = entropy(joint.sum(dim=1).numpy())
    dealt = _domains_dealt_anew(sums["blocks"].cpu())
    return {
        "mutual_information": bits,
        "normalized": bits / domain_entropy if domain_entropy > 0 else 0.0,
        **_chance("by_chance", [_bits(table) for table in dealt]),
        "specialization": share,
        **_chance("specialization_by_chance", [_largest_share(table) for table in dealt]),
    }


def _chance(name: str, draws: Sequence[float]) -> dict[str, float]:
    sample = torch.tensor(draws, dtype=torch.float64)
    low, high = sample.quantile(torch.tensor([0.025, 0.975], dtype=sample.dtype)).tolist()
    return {name: sample.mean().item(), f"{name}_low": low, f"{name}_high": high}


def _domains_dealt_anew(blocks: Float[Tensor, "G B N"]) -> list[Float[Tensor, "G N"]]:
    """Tables of counts after permuting the domains over the blocks of rows, from one seed."""
    domains, count, experts = blocks.shape
    units = blocks.reshape(-1, experts)
    counted = units.sum(dim=1) > 0
    labels = torch.arange(domains).repeat_interleave(count)[counted]
    generator = torch.Generator().manual_seed(0)
    tables = []
    for _ in range(PERMUTATIONS):
        dealt = labels[torch.randperm(len(labels), generator=generator)]
        tables.append(units.new_zeros(domains, experts).index_add_(0, dealt, units[counted]))
    return tables


def _largest_share(joint: Float[Tensor, "G N"]) -> float:
    seen = joint[joint.sum(dim=1) > 0]
    return (seen.amax(dim=1) / seen.sum(dim=1)).mean().item()


def _bits(joint: Float[Tensor, "G N"]) -> float:
    return max(0.0, information(joint.numpy()))


def anchor_metrics(wins: Float[Tensor, "N H"], anchors: Float[Tensor, "N H R"]) -> dict[str, float]:
    """Use of the anchors (heads) of the experts, from ``anchor_sums`` and the anchors.

    head_entropy: entropy of the wins inside an expert over log H, mean over used experts.
    effective_heads: exp of that entropy. unused_anchors: share of all anchors that never win.
    redundancy: mean over anchors of the cosine to the nearest other anchor of the same expert
    (1: copies). With one head: 1, 1, unused as counted, 0.
    """
    experts, heads = wins.shape
    entropies = [entropy(row.numpy()) for row in wins.cpu() if row.sum() > 0]
    count = max(1, len(entropies))
    units = torch.nn.functional.normalize(anchors.double(), dim=-1)
    cosines = units @ units.transpose(1, 2)
    cosines.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
    return {
        "head_entropy": sum(entropies) / count / math.log2(heads) if heads > 1 else 1.0,
        "effective_heads": sum(2**value for value in entropies) / count,
        "unused_anchors": (wins == 0).sum().item() / (experts * heads),
        "redundancy": cosines.amax(dim=-1).mean().item() if heads > 1 else 0.0,
    }


def _cv(load: Tensor) -> float:
    mean = load.mean()
    return (load.std(correction=0) / mean).item() if mean > 0 else 0.0


def _count(sums: Sums) -> float:
    tokens = sums["tokens"].item()
    if tokens < 1:
        raise ValueError("routing metrics need at least 1 token; got 0")
    return tokens
