"""Balance losses in float64 as their equations are published, without the coefficient.

N experts, K chosen of them, T tokens. s: the softmax of a token's logits. f and P: of one layer.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# logits [L, B, S, N] in float64, K, and the mask [B, S] of what is no padding
Reference = Callable[[Tensor, int, Tensor | None], Tensor]


def _layers(logits: Tensor, mask: Tensor | None) -> Iterable[Tensor]:
    """Logits [T, N] of the tokens of each layer that are no padding."""
    for layer in logits:
        yield layer.flatten(0, 1) if mask is None else layer[mask]


def chosen(logits: Tensor, top_k: int) -> Tensor:
    """1 where a token [T] chose an expert [N], else 0."""
    order = logits.argsort(dim=-1, descending=True, stable=True)[..., :top_k]
    return torch.zeros_like(logits).scatter(-1, order, 1.0)


def switch(logits: Tensor, top_k: int, mask: Tensor | None = None) -> Tensor:
    """Mean over layers of N sum_i f_i P_i (arXiv 2101.03961, Eq. 4 to 6; the L2R paper, Eq. 34).

    f_i: tokens that chose expert i, over T, so that the f_i sum to K. P_i: mean of s_i.
    """
    found = []
    for layer in _layers(logits, mask):
        f = chosen(layer, top_k).mean(0)
        found.append(layer.shape[-1] * (f * layer.softmax(-1).mean(0)).sum())
    return torch.stack(found).mean()


def gshard(logits: Tensor, top_k: int, mask: Tensor | None = None) -> Tensor:
    """The same with f of the first choice alone (arXiv 2006.16668, Algorithm 1: c_e / S)."""
    del top_k
    return switch(logits, 1, mask)


def pooled(logits: Tensor, top_k: int, mask: Tensor | None = None) -> Tensor:
    """N sum_i f_i P_i with f and P over the tokens of all layers together."""
    every = torch.cat(list(_layers(logits, mask)))
    return switch(every[None, None], top_k)


def over_k(logits: Tensor, top_k: int, mask: Tensor | None = None) -> Tensor:
    """``switch`` with f_i over K T, so that the f_i sum to 1 (arXiv 2409.02060)."""
    return switch(logits, top_k, mask) / top_k


def sequence(logits: Tensor, top_k: int, mask: Tensor | None = None) -> Tensor:
    """DeepSeek-V3's sequence-wise loss (arXiv 2412.19437, Eq. 17 to 20), mean over layers.

    Of a sequence of S tokens: sum_i f_i P_i, f_i = N / (K S) times the tokens that chose i. Scores
    are softmaxes here; they sum to 1, as Eq. 19 makes sigmoids do.
    """
    found = []
    for layer in logits:
        for row, tokens in enumerate(layer):
            real = tokens if mask is None else tokens[mask[row]]
            f = chosen(real, top_k).sum(0) * (real.shape[-1] / (top_k * len(real)))
            found.append((f * real.softmax(-1).mean(0)).sum())
    return torch.stack(found).mean()


def sigmoid_sequence(logits: Tensor, top_k: int, mask: Tensor | None = None) -> Tensor:
    """``sequence`` with sigmoids over their sum in place of s, which is Eq. 19 as published."""
    scores = logits.sigmoid()
    return sequence((scores / scores.sum(-1, keepdim=True)).log(), top_k, mask)


def gradient(reference: Reference, logits: Tensor, top_k: int, mask: Tensor | None) -> Tensor:
    """Gradient [L, B, S, N] of a reference in float64."""
    wide = logits.double().detach().requires_grad_()
    (found,) = torch.autograd.grad(reference(wide, top_k, mask), wide)
    return found
