"""One batch of router inputs and weights, and what every framework is asked about it.

Shape letters: L layers, B sequences, S tokens of each, D width, N experts, K chosen per token.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

COEFFICIENT = 0.01
LAYERS, EXPERTS, TOP_K = 3, 12, 4
ROWS, LENGTH, WIDTH = 4, 60, 32
LENGTHS = (60, 60, 48, 32)  # of the padded batch


class Added(NamedTuple):
    """What a framework adds: the value of the loss and its gradient of router weights [L, N, D]."""

    value: float
    gradient: Tensor


# x [B, S, D], weights [L, N, D], K, and the mask [B, S] of what is no padding
Balance = Callable[[Tensor, Tensor, int, Tensor | None], Added]


def inputs() -> tuple[Tensor, Tensor]:
    """Inputs x [B, S, D] and weights [L, N, D]: logits of order one, some experts preferred."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=draw)
    x[..., 0] = 1  # a bias of each expert, other in each layer
    weights = torch.randn(LAYERS, EXPERTS, WIDTH, generator=draw) / WIDTH**0.5
    weights[..., 0] = torch.randn(LAYERS, EXPERTS, generator=draw)
    return x, weights


def as_weights(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and weights that give logits [L, B, S, N] to the bit.

    The inputs are the rows of the identity, so that the gradient of a weight is that of a logit.
    """
    layers, rows, length, experts = logits.shape
    x = torch.eye(rows * length, dtype=logits.dtype).view(rows, length, -1)
    return x, logits.reshape(layers, -1, experts).transpose(1, 2).contiguous()


def logits_of(x: Tensor, weights: Tensor) -> Tensor:
    """Logits [L, B, S, N] of a linear router in each layer."""
    return torch.einsum("bsd,lnd->lbsn", x, weights)


def batch_logits() -> Tensor:
    """Logits [L, B, S, N] of the batch."""
    return logits_of(*inputs())


def balanced_logits(top_k: int) -> Tensor:
    """Logits [1, B, S, N] of one layer in which every expert gets as many tokens in every row."""
    token = torch.arange(LENGTH)
    near = (torch.arange(EXPERTS) - token[:, None]) % EXPERTS < top_k
    return near.float().expand(1, ROWS, LENGTH, EXPERTS).contiguous()


def padding_mask() -> Tensor:
    """Mask [B, S] of a batch whose rows are filled up on the right."""
    return torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
