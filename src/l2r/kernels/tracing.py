"""Watchers and transforms of torch operations, for which fused code must step aside.

torch has no public function that says so for modes and transforms. Where a private one is
missing, everything counts as watched, or as transformed, which is safe.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch import compiler as _compiler
from torch.autograd import forward_ad as _forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

_PLAIN_TYPES = {Tensor, nn.Parameter, type(None)}
_dispatch_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)
_functorch = getattr(torch._C, "_functorch", None)
_has_transforms: Callable[[], bool] | None = getattr(
    torch._C, "_are_functorch_transforms_active", None
)
_jit_trace: Callable[[], object] | None = getattr(torch._C, "_get_tracing_state", None)
_is_batched: Callable[[Tensor], bool] | None = getattr(_functorch, "is_legacy_batchedtensor", None)


def traced(*tensors: Tensor | None) -> bool:
    """Tell whether a compiler, a dispatch mode or a tensor subclass watches operations."""
    if torch.compiler.is_compiling() or _dispatch_modes is None or _dispatch_modes() > 0:
        return True
    if _jit_trace is None or _jit_trace() is not None:  # torch.jit.trace, ONNX's older exporter
        return True
    return not _PLAIN_TYPES.issuperset(map(type, tensors))


def untouched(*tensors: Tensor | None) -> bool:
    """Tell whether a call is neither ``traced`` nor ``transformed``, for a decoding step.

    Written out and with names of this module alone: memory that a model's other layers have driven
    out of the caches is most of what such a step waits for.
    """
    if is_dynamo_compiling() or getattr(_compiler, "_is_compiling_flag", True):
        return False
    for tensor in tensors:
        kind = type(tensor)
        if kind is not Parameter and kind is not Tensor and tensor is not None:
            return False
    return (
        _dispatch_modes is not None
        and _has_transforms is not None
        and _dispatch_modes() == 0
        and not _has_transforms()
        and _jit_trace is not None
        and _jit_trace() is None
        and getattr(_forward_ad, "_current_level", 0) < 0
    )


def exported() -> bool:
    """Tell whether torch.export reads the code.

    Inside torch.compile the public function is always true before torch 2.12.
    """
    flag: bool | None = getattr(torch.compiler, "_is_exporting_flag", None)
    return torch.compiler.is_exporting() if flag is None else flag


def _once_in_a_trace(ask: Callable[[], bool]) -> Callable[[], bool]:
    """Mark a function as torch.compiler.assume_constant_result does, without its slow import."""
    vars(ask)["_dynamo_marked_constant"] = True
    return ask


@_once_in_a_trace
def transformed() -> bool:
    """Tell whether vmap, grad, jvp or forward-mode differentiation runs: they need plain code.

    torch.compile calls this while it traces, when the transforms inside are entered.
    """
    if _has_transforms is None or _has_transforms():
        return True
    return forward_mode()


@_once_in_a_trace
def forward_mode() -> bool:
    """Tell whether forward-mode differentiation runs, that of ``torch.func.jvp`` too."""
    level = getattr(torch.autograd.forward_ad, "_current_level", None)
    return level is None or level >= 0


def batched(*gradients: Tensor | None) -> bool:
    """Tell whether gradients are batched: ``is_grads_batched``, ``jacobian(vectorize=True)``."""
    return _is_batched is None or any(g is not None and _is_batched(g) for g in gradients)


def in_backward() -> bool:
    """Tell whether this thread runs a backward pass; a layer that runs now is recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)
