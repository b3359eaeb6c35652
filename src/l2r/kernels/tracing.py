"""Whether something watches or transforms torch operations, so that fused code must step aside.

torch has no public function that says so for modes and transforms. Where a private one is
missing, everything counts as watched, or as transformed, which is safe.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

_PLAIN_TYPES = {Tensor, nn.Parameter, type(None)}
_dispatch_modes: Callable[[], int] | None = getattr(torch._C, "_len_torch_dispatch_stack", None)
_functorch = getattr(torch._C, "_functorch", None)
_functorch_layer: Callable[[], object] | None = getattr(_functorch, "peek_interpreter_stack", None)
_is_batched: Callable[[Tensor], bool] | None = getattr(_functorch, "is_legacy_batchedtensor", None)


def traced(*tensors: Tensor | None) -> bool:
    """Whether something watches operations: a compiler, a dispatch mode or a tensor subclass."""
    if torch.compiler.is_compiling() or _dispatch_modes is None or _dispatch_modes() > 0:
        return True
    return not _PLAIN_TYPES.issuperset(map(type, tensors))


def exported() -> bool:
    """Whether torch.export reads the code.

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
    """Inside vmap, grad, jvp or forward-mode differentiation, which need differentiable parts.

    torch.compile calls this while it traces, when the transforms inside are entered.
    """
    if _functorch_layer is None or _functorch_layer() is not None:
        return True
    return forward_mode()


@_once_in_a_trace
def forward_mode() -> bool:
    """Inside forward-mode differentiation, that of ``torch.func.jvp`` too."""
    level = getattr(torch.autograd.forward_ad, "_current_level", None)
    return level is None or level >= 0


def batched(*gradients: Tensor | None) -> bool:
    """Whether gradients are many at once: ``is_grads_batched`` and ``jacobian(vectorize=True)``."""
    return _is_batched is None or any(g is not None and _is_batched(g) for g in gradients)
