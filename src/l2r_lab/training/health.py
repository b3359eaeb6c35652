"""Find where a NaN or an infinity came from: the first module, or the first gradient."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.routers.observe import Hook, hooked
from l2r_lab.training.ranks import Ranks


class NonFiniteError(InputError):
    """Training met a NaN or an infinity; the message names the step, the layer and the cause."""


def explain_loss(
    model: nn.Module, forward: Callable[[], Tensor], step: int, ranks: Ranks
) -> str | None:
    """Run the forward to a loss; where it is not finite name the first parameter or module output.

    None where it is finite on every rank. The ranks, which share a forward, call this together.
    """
    parameter = ranks.least(_first_bad(model.named_parameters()))
    first_bad: list[str] = []

    def hook_for(name: str) -> Hook:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not first_bad and any(not bool(torch.isfinite(t).all()) for t in _floats(output)):
                first_bad.append(f"first non-finite output: {name} ({type(module).__name__})")

        return hook

    hooks = {module: hook_for(name) for name, module in model.named_modules() if name}
    with torch.no_grad(), hooked(hooks):
        loss = float(forward())
    cause = first_bad[0] if first_bad else "every module output is finite, the loss is not"
    if parameter is not None:
        cause = f"parameter {parameter[1]} is not finite"
    own = None if math.isfinite(loss) else (ranks.rank, f"step {step}: loss is {loss}; {cause}")
    bad = ranks.least(own)
    return None if bad is None else bad[1]


def explain_gradient(model: nn.Module, step: int, norm: float, ranks: Ranks) -> str:
    """Name the first parameter whose gradient is not finite. The ranks call this together."""
    gradients = ((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    bad = ranks.least(_first_bad(gradients))
    if bad is None:
        return f"step {step}: gradient norm is {norm}; it overflowed, every gradient is finite"
    return f"step {step}: gradient norm is {norm}; first non-finite gradient: {bad[1]}"


def _first_bad(tensors: Iterable[tuple[str, Tensor]]) -> tuple[int, str] | None:
    """Place and name of the first that is not finite in this rank's part of it."""
    for place, (name, tensor) in enumerate(tensors):
        if not bool(torch.isfinite(_local(tensor)).all()):
            return place, name
    return None


def _floats(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for part in output for tensor in _floats(part)]
    return []


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
