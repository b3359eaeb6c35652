"""Pooling: anchor scores to one logit per expert (paper, Section 3.4)."""

import torch
from jaxtyping import Float
from torch import Tensor


def pool_anchors(scores: Float[Tensor, "T N H"]) -> Float[Tensor, "T N"]:
    """Log-sum-exp over the anchors of every expert, Eq. 13; the identity for one anchor.

    Between max_h z and max_h z + log(H): a smooth maximum whose gradient is a softmax.
    """
    return torch.logsumexp(scores, dim=-1)
