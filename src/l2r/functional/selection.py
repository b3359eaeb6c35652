"""Selection: logits to probabilities, and probabilities to k experts (paper, Section 3.1).

Experts are chosen in one order everywhere, in these functions and in every kernel: largest first,
the lowest index first among equals. NaN counts as -inf, so it comes last, and a token of which
nothing is a number gets the first k experts. Softmax and sigmoid are ranked by their logits, whose
order survives where probabilities round to 0 or 1. The kernels' own forms of the rule are in
kernels/cpu_blocks.py, kernels/native/selection.h and kernels/triton/forward.py.

Shape letters: T tokens, N experts, K experts chosen per token.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor


def routing_probs(logits: Float[Tensor, "T N"]) -> Float[Tensor, "T N"]:
    """Softmax over experts, Eq. 2, in fp32 or better; logits already carry the temperature."""
    return torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def best_experts(ranking: Float[Tensor, "T N"], top_k: int) -> Int[Tensor, "T K"]:
    """Return the indices of the k largest of every token, in the order above.

    Raises ValueError for a top_k outside of 1 to N.
    """
    if not 1 <= top_k <= ranking.shape[-1]:
        raise ValueError(f"top_k must be between 1 and {ranking.shape[-1]}; got top_k={top_k}")
    comparable = ranking.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    # torch.topk promises no order of equals.
    return torch.sort(comparable, dim=-1, descending=True, stable=True).indices[..., :top_k]


def select_experts(
    probs: Float[Tensor, "T N"],
    top_k: int,
    *,
    normalize: bool = False,
    norm_eps: float = 0.0,
    ranking: Float[Tensor, "T N"] | None = None,
) -> tuple[Float[Tensor, "T K"], Int[Tensor, "T K"]]:
    """Top-k experts of every token and the weights of their outputs, Eq. 3.

    The paper, as OLMoE, uses the probabilities as they are; ``normalize`` makes the k
    weights of a token sum to 1, with ``norm_eps`` added to the sum. ``ranking``: what experts
    are chosen by, where it is not the probabilities. Raises ValueError as ``best_experts``.
    """
    indices = best_experts(probs if ranking is None else ranking, top_k)
    return expert_weights(probs, indices, normalize=normalize, norm_eps=norm_eps), indices


def first_choice(scores: Float[Tensor, "T K"], indices: Int[Tensor, "T K"]) -> Int[Tensor, " T"]:
    """Expert of the largest score or weight; some Hugging Face routers return the k unsorted."""
    return indices.gather(1, scores.argmax(dim=1, keepdim=True)).flatten()


def largest_logit(logits: Float[Tensor, "T N"], indices: Int[Tensor, "T K"]) -> Int[Tensor, "T 1"]:
    """Expert with the largest logit among the k of every token."""
    return first_choice(logits.gather(1, indices), indices).unsqueeze(1)


def expert_weights(
    probs: Float[Tensor, "T N"],
    indices: Int[Tensor, "T K"],
    *,
    normalize: bool = False,
    norm_eps: float = 0.0,
    norm_min: float = 0.0,
) -> Float[Tensor, "T K"]:
    """Weights of the outputs of chosen experts; see ``select_experts``.

    A sum below ``norm_min`` is raised to it.
    """
    weights = probs.gather(-1, indices)
    if normalize:
        total = weights.sum(dim=-1, keepdim=True) + norm_eps
        weights = weights / (total.clamp_min(norm_min) if norm_min else total)
    return weights


def softmax_weights(
    logits: Float[Tensor, "T N"], indices: Int[Tensor, "T K"], *, normalize: bool = False
) -> Float[Tensor, "T K"]:
    """Softmax probabilities of chosen experts; normalized ones of the k logits alone.

    All k of a route may be unlikely, and their quotients then 0 / 0.
    """
    if normalize:
        return routing_probs(logits.gather(-1, indices))
    return expert_weights(routing_probs(logits), indices)
