"""Selection: logits to probabilities, and probabilities to k experts (paper, Section 3.1).

Shape letters: T tokens, N experts, K experts chosen per token.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def routing_probs(logits: Float[Tensor, "T N"]) -> Float[Tensor, "T N"]:
    """Softmax over experts, Eq. 2, in fp32 or better; logits already carry the temperature."""
    return torch.softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


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
    are chosen by, where it is not the probabilities.
    """
    if ranking is None:
        weights, indices = torch.topk(probs, top_k, dim=-1)
    else:
        indices = torch.topk(ranking, top_k, dim=-1).indices
        weights = probs.gather(-1, indices)
    if normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + norm_eps)
    return weights, indices
