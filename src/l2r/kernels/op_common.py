"""What the fused operations share: registration, fake results and gradient plumbing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

Grads = tuple[Tensor | None, ...]
Body = Callable[..., Any]


class Operation:
    """A differentiable operation with two ways to run the same two bodies.

    ``op`` and ``op_backward`` are registered with torch.library and serve compilers, dispatch modes
    and tensor subclasses. In plain eager mode an autograd function calls the bodies directly,
    which spares 100 microseconds a call.

    Args:
        name: of the operation, with its namespace; the backward's has ``_backward`` after it.
        run, run_backward: the bodies, with annotations from which the schemas are made.
        fake, fake_backward: the same with empty results of the right shapes.
        setup: saves for the backward, as in torch.library.register_autograd.
        backward: (run_backward, ctx, *grads) to the gradients of all inputs.
    """

    def __init__(
        self,
        name: str,
        run: Body,
        run_backward: Body,
        *,
        fake: Body,
        fake_backward: Body,
        setup: Body,
        backward: Callable[..., Grads],
    ) -> None:
        self.op = torch.library.custom_op(name, run, mutates_args=())
        self.op_backward = torch.library.custom_op(
            f"{name}_backward", run_backward, mutates_args=()
        )
        self.op.register_fake(fake)
        self.op_backward.register_fake(fake_backward)

        def through_op(ctx: Any, *grads: Tensor | None) -> Grads:
            return backward(self.op_backward, ctx, *grads)

        self.op.register_autograd(through_op, setup_context=setup)

        class Eager(Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                output = run(*inputs)
                setup(ctx, inputs, output)
                return output

            @staticmethod
            @once_differentiable
            def backward(ctx: Any, *grads: Tensor | None) -> Grads:
                return backward(run_backward, ctx, *grads)

        self._eager: Body = Eager.apply

    def __call__(self, *inputs: Any) -> Any:
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        return (self.op if traced(*tensors) else self._eager)(*inputs)


_PLAIN_TYPES = {Tensor, torch.nn.Parameter, type(None)}


def traced(*tensors: Tensor | None) -> bool:
    """Whether something watches operations: a compiler, a dispatch mode or a tensor subclass."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return not _PLAIN_TYPES.issuperset(map(type, tensors))


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
