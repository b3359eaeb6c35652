"""Selection stage of the CPU backend in torch operations: softmax, top-k, and their gradient."""

import torch
from torch import Tensor

from l2r.functional import best_experts
from l2r.kernels.checks import check_range
from l2r.kernels.contract import Options, Tensors, first_input


def select(given: Tensors, options: Options) -> Tensors:
    """Softmax weights and indices of the top-k logits or of given routes; lse where it is saved."""
    wide = first_input(given).float()
    probs, indices = torch.softmax(wide, dim=1), _best(wide, options.top_k)
    lse = None
    if options.save:  # log sum exp = logit - log prob, exact for the most probable expert
        first = indices[:, :1]
        lse = (wide.gather(1, first) - probs.gather(1, first).log()).squeeze(1)
    if given.routes is not None:
        check_routes(given.routes, wide.shape[1])
        indices = torch.where(given.routes[:, :1] < 0, indices, given.routes)
    if options.normalize:  # of the k logits alone: all k of a route may be unlikely
        weights = torch.softmax(wide.gather(1, indices), dim=1)
    else:
        weights = probs.gather(1, indices)
    return given._replace(weights=weights, indices=indices, lse=lse)


def _best(logits: Tensor, top_k: int) -> Tensor:
    """``best_experts``; sorts all of them only where there are equals, or NaN, to put in order."""
    if logits.is_cpu:  # another device would have to be waited for
        values, indices = torch.topk(logits, min(top_k + 1, logits.shape[1]), dim=1)
        if bool((values[:, 1:] < values[:, :-1]).all()):
            return indices[:, :top_k].contiguous()
    return best_experts(logits, top_k)


def select_backward(tensors: Tensors, up: Tensors, *, normalize: bool) -> Tensor:
    """Gradient of the logits [T, N], fp32."""
    logits, weights, indices, lse = tensors.logits, tensors.weights, tensors.indices, tensors.lse
    assert logits is not None and weights is not None and indices is not None and lse is not None
    if up.weights is None:
        assert up.logits is not None
        return up.logits.float()
    chosen = weights * up.weights
    total = chosen.sum(dim=1, keepdim=True)
    if normalize:
        grad = torch.zeros_like(logits, dtype=torch.float32)
        chosen -= weights * total
    else:
        grad = torch.sub(logits.float(), lse.unsqueeze(1)).exp_().mul_(-total)
    grad.scatter_add_(1, indices, chosen)
    return grad if up.logits is None else grad.add_(up.logits)


def check_routes(routes: Tensor, experts: int) -> None:
    """Raise ValueError for a route to no expert, or to one twice. A GPU's are not read."""
    if not routes.is_cpu:
        return
    given = routes[:, 0] >= 0
    check_range("routes", routes[given], experts)
    ordered = routes.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]) & given[:, None]
    if twice.any():
        token, place = twice.nonzero()[0].tolist()
        expert = int(ordered[token, place])
        raise ValueError(
            f"routes must be of different experts; token {token} has expert {expert} twice"
        )
