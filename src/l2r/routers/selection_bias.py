"""Bias balancing without a loss (arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, Eq. 16)."""

import torch
from jaxtyping import Float, Real
from torch import Tensor


@torch.no_grad()
def update_selection_bias(
    bias: Float[Tensor, " N"] | None, load: Real[Tensor, " N"], *, speed: float = 0.001
) -> None:
    """Lower the bias of experts above the mean load by ``speed``, raise that of those below.

    Call it after each step; it works in place. ``load`` is what each expert got, summed over
    micro-batches and ranks. Counts (``expert_counts``) are compared as whole numbers. Shares in
    floating point are taken as equal to their mean within 16 roundings of it. ``bias`` is one of
    ``l2r.hf.swap.selection_biases(model)``, or what ``router.selection.held_bias(router)`` gives.

    Raises ValueError where there is no bias, and for a load of another number of experts.
    """
    if bias is None:
        raise ValueError(
            "bias must be a tensor [N]; got None: this router holds no selection bias. "
            "l2r.hf.swap.selection_biases(model) has those that its block holds"
        )
    if bias.dtype.itemsize < 4:
        raise ValueError(f"bias must be float32 or wider, else updates are lost; got {bias.dtype}")
    if load.shape != bias.shape:
        raise ValueError(
            f"load must have an entry for each of the {len(bias)} experts; got {list(load.shape)}"
        )
    whole = not load.is_floating_point()
    wide = load.long() if whole else load.double()
    total = wide.sum()
    above = wide * len(load) - total
    if not whole:
        rounding = 16 * torch.finfo(load.dtype).eps * total.abs()
        above = above.masked_fill(above.abs() <= rounding, 0)
    bias -= speed * torch.sign(above).to(bias)
