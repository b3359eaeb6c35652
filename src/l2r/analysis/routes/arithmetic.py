"""The same model in other arithmetic: bf16 parameters, weights rounded to 8 bits.

Routers and their selection biases keep their precision in all of them, as in a bf16 load of ours.
Rounded weights are kept in the dtype of the model, so that rounding is all that changes.
"""

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from l2r.analysis.diagnostics import bf16_copy
from l2r.errors import InputError
from l2r.files.mismatch import ARITHMETICS
from l2r.hf.models import check_unpacked
from l2r.hf.routes import routed_layers
from l2r.routers import Router

_LARGEST = {"int8": 127.0, "fp8": 448.0}


def in_other_arithmetic(model: nn.Module, name: str) -> nn.Module:
    """Copy of a model in bf16, int8 or fp8.

    bf16: all floats that a checkpoint holds but the routers'. int8: weights of linear layers and of
    experts, each output channel divided by its largest absolute value / 127, rounded to whole
    numbers and multiplied back; embeddings and the output layer stay. fp8: the same with float8
    e4m3, by the largest absolute value / 448.

    Raises ValueError for another name, for packed weights, and for a model without a supported
    router.
    """
    if name not in ARITHMETICS:
        raise InputError(f"arithmetic must be one of {', '.join(ARITHMETICS)}; got {name!r}")
    check_unpacked(model, name)
    routed_layers(model)
    copy = bf16_copy(model) if name == "bf16" else deepcopy(model)
    routers = [site.router for layer in routed_layers(copy) for site in layer.sites]
    if name == "bf16":
        for router in routers:
            if not isinstance(router, Router):
                router.forward = _AnyDtype(router)
        return copy
    excluded = {parameter for router in routers for parameter in router.parameters()}
    for weight, inputs in _weights(copy):
        if weight not in excluded:
            weight.data = rounded(weight.data, name, inputs)
    return copy


def rounded(weight: Tensor, name: str, inputs: int = -1) -> Tensor:
    """Round a weight to int8 or fp8 by output channel; ``inputs`` is the dimension summed over."""
    wide = weight.float()
    scale = wide.abs().amax(dim=inputs, keepdim=True).clamp_min(1e-30) / _LARGEST[name]
    steps = wide / scale
    steps = steps.round() if name == "int8" else steps.to(torch.float8_e4m3fn).float()
    return (steps * scale).to(weight.dtype)


def _weights(model: nn.Module) -> Iterator[tuple[Tensor, int]]:
    """Iterate over weights of linear layers and experts, with the dimension of their sums."""
    embeddings: Any = getattr(model, "get_output_embeddings", lambda: None)()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            if module is not embeddings:
                yield module.weight, -1
            continue
        inputs = -2 if getattr(module, "is_transposed", False) else -1
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 3 and not isinstance(module, nn.Conv1d):
                yield parameter, inputs


class _AnyDtype:
    """A forward of a family's own router in the dtype of its weights, whatever its inputs are.

    It holds its router, so that a copy of the model calls the copy's.
    """

    def __init__(self, router: nn.Module) -> None:
        self._router, self._dtype = router, next(router.parameters()).dtype
        self._replaced = vars(router).get("forward")

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        forward: Any = self._replaced or partial(type(self._router).forward, self._router)
        try:
            return forward(hidden, *args, **kwargs)  # some families convert it themselves
        except RuntimeError:  # a product of two dtypes
            logits, weights, indices = forward(hidden.to(self._dtype), *args, **kwargs)
            return logits, weights.to(hidden.dtype), indices
