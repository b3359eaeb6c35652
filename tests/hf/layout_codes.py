"""Codes of quantizers, unpacked by hand: what transformers' numbers are compared with."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# The values of 4-bit floats with two bits of exponent and one of mantissa.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BLOCK = 128


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Numbers [E, I, O] of codes [E, O, I / 32, 16] and exponents [E, O, I / 32]."""
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    both = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], dim=-1)
    numbers = both.flatten(-2) * (scales.float() - 127).exp2()[..., None]
    return numbers.flatten(-2).transpose(1, 2)


def from_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """Numbers [R, C] of codes and a scale for each block of 128 by 128."""
    each = scales.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
    return codes.float() * each[: len(codes), : codes.shape[1]]


def from_int4(packed: Tensor, scales: Tensor) -> Tensor:
    """Numbers [R, C] of eight codes in an int32 and a scale for each group of a row."""
    shifts = torch.arange(0, 32, 4)
    codes = ((packed[..., None] >> shifts) & 15).flatten(1) - 8
    return codes * scales.float().repeat_interleave(_BLOCK, 1)


def from_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """Numbers [R, C] of codes and a scale for each row."""
    return codes.float() * scales.float()


def nf4_scales(codes: Tensor, values: Tensor, scales: Tensor, size: int, offset: float) -> Tensor:
    """Scales of blocks that are codes themselves, with a scale for each ``size`` of them."""
    each = scales.repeat_interleave(size)[: len(codes)]
    return values[codes.long()] * each + offset


def from_nf4(packed: Tensor, values: Tensor, scales: Tensor, size: int) -> Tensor:
    """Numbers of codes, the higher four bits of a byte first, in blocks of ``size`` of a scale."""
    flat = packed.flatten()
    codes = torch.stack([flat >> 4, flat & 15], dim=1).flatten()
    return values[codes.long()] * scales.repeat_interleave(size)[: len(codes)]


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A folder's tensors with whole weights in bfloat16, as the names of their parts say."""
    parts = (
        "_scales", "_scale_inv", "_scale", "_shape", ".absmax", ".quant_map", ".nested_absmax",
        ".nested_quant_map", ".quant_state.bitsandbytes__nf4", ".SCB", ".weight_format",
    )  # fmt: skip
    names = [name for name in tensors if not name.endswith(parts)]
    return dict(_whole(name, tensors) for name in names)


def _whole(name: str, tensors: Mapping[str, Tensor]) -> tuple[str, Tensor]:
    stored, own = tensors[name], name.removesuffix("_blocks").removesuffix("_packed")
    if name.endswith("_blocks"):
        stored = from_mxfp4(stored, tensors[f"{own}_scales"])
    elif name.endswith("_packed"):
        stored = from_int4(stored, tensors[f"{own}_scale"])
    elif f"{name}_scale_inv" in tensors:
        stored = from_fp8(stored, tensors[f"{name}_scale_inv"])
    elif f"{name}_scale" in tensors:
        stored = from_rows(stored, tensors[f"{name}_scale"])
    elif f"{name}.absmax" in tensors:
        stored = _of_bitsandbytes(name, tensors)
    return own, stored.bfloat16()


def _of_bitsandbytes(name: str, tensors: Mapping[str, Any]) -> Tensor:
    state = tensors[f"{name}.quant_state.bitsandbytes__nf4"]
    sizes = json.loads(bytes(state.tolist()))
    scales = nf4_scales(
        tensors[f"{name}.absmax"],
        tensors[f"{name}.nested_quant_map"],
        tensors[f"{name}.nested_absmax"],
        sizes["nested_blocksize"],
        sizes["nested_offset"],
    )
    values = tensors[f"{name}.quant_map"]
    return from_nf4(tensors[name], values, scales, sizes["blocksize"]).view(sizes["shape"])
