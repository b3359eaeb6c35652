"""Find where a NaN or an infinity came from: the first module, or the first gradient."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from l2r.routers.observe import Hook, hooked


class NonFiniteError(ValueError):
    """Training met a NaN or an infinity; the message names the step, the layer and the cause."""


def explain_loss(model: nn.Module, forward: Callable[[], Any], step: int, loss: Tensor) -> str:
    """Run the forward again and name the first parameter or module output that is not finite."""
    head = f"step {step}: loss is {float(loss.detach())}"
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(_local(parameter)).all()):
            return f"{head}; parameter {name} is not finite"
    first_bad: list[str] = []

    def hook_for(name: str) -> Hook:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if not first_bad and any(not bool(torch.isfinite(t).all()) for t in _floats(output)):
                first_bad.append(f"first non-finite output: {name} ({type(module).__name__})")

        return hook

    hooks = {module: hook_for(name) for name, module in model.named_modules() if name}
    with torch.no_grad(), hooked(hooks):
        forward()
    return (
        f"{head}; {first_bad[0] if first_bad else 'every module output is finite, the loss is not'}"
    )


def explain_gradient(model: nn.Module, step: int, norm: float) -> str:
    """Name the first parameter whose gradient is not finite."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not bool(torch.isfinite(_local(parameter.grad)).all()):
            return f"step {step}: gradient norm is {norm}; first non-finite gradient: {name}"
    return f"step {step}: gradient norm is {norm}; it overflowed, every gradient is finite"


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
