"""Grouped product: multiply every row by the matrix of its expert, also where torch refuses.

``grouped_mm`` takes fp32, bf16 and fp16 whose strides and addresses are multiples of 16 bytes.
Its shape rules, which compilers, torch.export and the meta device use, take bf16 only.
In bf16 a GPU multiplies fewer than 1,024 matrices at a time. ``grouped_linear`` handles these
limits. Only float64, which serves gradient checks, and forward-mode differentiation wait for
numbers from the device.

Shape letters: S rows sorted by expert, N experts, I inputs, O outputs.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import grouped_mm, pad

from l2r.functional.autocast import product_inputs
from l2r.kernels.tracing import forward_mode, transformed

_BYTES = 16
_MATRICES = 1023  # of one product in bf16 on a GPU


def grouped_linear(
    x: Float[Tensor, "S I"],
    weight: Float[Tensor, "N O I"],
    ends: Int[Tensor, " N"],
) -> Float[Tensor, "S O"]:
    """Apply expert n's matrix to rows ends[n-1]:ends[n] of x; under autocast in its dtype."""
    x, weight = product_inputs(x, weight)
    if x.dtype != torch.bfloat16 and _only_shapes(x):
        whole: Tensor = _as_operation(x, weight, ends)
        return whole
    if x.dtype == torch.float64 or forward_mode():
        return torch.cat([rows @ weight[n].T for n, rows in enumerate(_segments(x, ends))])
    outputs = weight.shape[1]
    x, weight = _aligned(x), _aligned(weight, rows=True)
    if _too_many(x, ends):
        product = _in_parts(x, weight, ends)
    else:
        product = grouped_mm(x, weight.transpose(-2, -1), offs=ends)
    return product if product.shape[1] == outputs else product[:, :outputs]


def _too_many(x: Tensor, ends: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16 and len(ends) > _MATRICES


def _in_parts(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Add products of some experts each; a zero matrix multiplies the rows of all others.

    Exact, but every part computes all rows. Rows of one part alone would be cut at numbers that
    only the device knows.
    """
    none, starts = weight.new_zeros(1, *weight.shape[1:]), pad(ends, (1, 0))
    products = []
    for first in range(0, len(ends), _MATRICES - 2):
        last = min(first + _MATRICES - 2, len(ends))
        matrices = torch.cat([none, weight[first:last], none]).transpose(-2, -1)
        parts = pad(starts[first : last + 1], (0, 1), value=len(x))  # before, of these, after
        products.append(grouped_mm(x, matrices, offs=parts))
    return sum(products[1:], products[0])


def _only_shapes(x: Tensor) -> bool:
    """Tell whether only shapes are computed: inside a compiler, or for a tensor without storage."""
    return torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor)


def _segments(x: Tensor, ends: Tensor) -> tuple[Tensor, ...]:
    return x.tensor_split(ends[:-1].tolist())


def _aligned(tensor: Tensor, *, rows: bool = False) -> Tensor:
    """Pad rows (and their number) with zeros, and copy if needed, to multiples of 16 bytes."""
    step = _BYTES // tensor.element_size()
    wide = -tensor.shape[-1] % step
    high = -tensor.shape[-2] % step if rows else 0
    if wide or high:
        return pad(tensor, (0, wide, 0, high))
    if _only_shapes(tensor):
        return tensor
    if transformed() or tensor.data_ptr() % _BYTES:  # torch.func shows no address
        return tensor.clone()
    return tensor


@torch.library.custom_op("l2r::grouped_linear", mutates_args=())
def _as_operation(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Register the product as one operation with shape rules for every dtype."""
    return grouped_linear(x, weight, ends).contiguous()


@_as_operation.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("l2r::grouped_outer", mutates_args=())
def _outer(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Gradient of the weight: per expert the rows of grad, transposed, times those of x."""
    if x.dtype == torch.float64:
        pairs = zip(_segments(grad, ends), _segments(x, ends), strict=True)
        return torch.stack([up.T @ rows for up, rows in pairs])
    wide = grouped_mm(_aligned(grad).T, _aligned(x), offs=ends)
    return wide[:, : grad.shape[1], : x.shape[1]].contiguous()


@_outer.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = _as_operation(grad, weight.transpose(1, 2).contiguous(), ends)
    if ctx.needs_input_grad[1]:
        grad_weight = _outer(grad, x, ends)
    return grad_x, grad_weight, None


_as_operation.register_autograd(_backward, setup_context=_save)
