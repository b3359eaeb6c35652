"""What the registered operations share: fake results and gradient plumbing."""

import torch
from torch import Tensor

Grads = tuple[Tensor | None, ...]


def fake_selected(like: Tensor, top_k: int, sums: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, experts = like.shape
    return (
        like.new_empty(tokens, top_k, dtype=torch.float32),
        like.new_empty(tokens, top_k, dtype=torch.int64),
        like.new_empty(tokens, dtype=torch.float32),
        like.new_empty((2, experts) if sums else (0, 2, experts), dtype=torch.float32),
    )


def share_of(grad_sums: Tensor | None) -> Tensor | None:
    """Gradient of the probability sums; the counts beside them have none."""
    return None if grad_sums is None or grad_sums.dim() == 3 else grad_sums[0]


def dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
