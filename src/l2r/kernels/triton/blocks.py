"""Device functions that the Triton kernels share: loads, transforms of query and anchors, products.

Every function works on one block held in registers, in fp32. ``given`` are the ``Tensors`` of the
contract, None where they were not given, and ``call`` is ``launch.Call``. R is padded to RP lanes
that hold zeros; products over R use the matrix units from RP = 16 on, which they need, and below a
loop over the R columns, which is faster for the paper's rank 2.

Rows of tokens are counted in 64 bits, since T times D may not fit into 32.

Shape letters: BT tokens, BC columns (a column is one anchor of one expert), RP padded rank.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

# tf32x3 splits fp32 operands into two tf32 parts: fp32 accuracy at matrix-unit speed. AMD's
# compiler refuses it; its matrix units multiply fp32.
PRECISION = tl.constexpr("ieee" if torch.version.hip else "tf32x3")


@triton.jit
@no_type_check
def tanh(x):
    """tanh through the sigmoid, which the interpreter has as well; absolute error 1e-7."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
@no_type_check
def column(block, index, RP: tl.constexpr):
    """Column ``index`` of a [B, RP] block as [B]."""
    return tl.sum(tl.where(tl.arange(0, RP)[None, :] == index, block, 0.0), 1)


@triton.jit
@no_type_check
def product(left, right, R: tl.constexpr, RP: tl.constexpr):
    """left [A, RP] times right [B, RP] transposed: [A, B]."""
    if RP >= 16:
        out = tl.dot(left, tl.trans(right), input_precision=PRECISION)
    else:
        out = column(left, 0, RP)[:, None] * column(right, 0, RP)[None, :]
        for r in tl.static_range(1, R):
            out += column(left, r, RP)[:, None] * column(right, r, RP)[None, :]
    return out


@triton.jit
@no_type_check
def weighted_sum(weights, vectors, R: tl.constexpr, RP: tl.constexpr):
    """weights [A, B] times vectors [B, RP]: [A, RP]."""
    if RP >= 16:
        out = tl.dot(weights, vectors, input_precision=PRECISION)
    else:
        lane = tl.arange(0, RP)[None, :]
        out = tl.zeros([weights.shape[0], RP], tl.float32)
        for r in tl.static_range(R):
            part = tl.sum(weights * column(vectors, r, RP)[None, :], 1)
            out += tl.where(lane == r, part[:, None], 0.0)
    return out


@triton.jit
@no_type_check
def load_block(ptr, rows, cols, height, width):
    """Entries at rows and cols of a matrix [height, width] in fp32, zeros outside of it."""
    at = rows[:, None] * width + cols[None, :]
    inside = (rows < height)[:, None] & (cols < width)[None, :]
    return tl.load(ptr + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def store_block(ptr, values, rows, cols, height, width):
    """Write entries at rows and cols of a matrix [height, width] in its dtype."""
    at = rows[:, None] * width + cols[None, :]
    inside = (rows < height)[:, None] & (cols < width)[None, :]
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def sum_block(ptr, rows, cols, height, width, splits, BS: tl.constexpr):
    """``load_block`` of the sum of many matrices [splits, height, width], BS of them at a time."""
    at = rows.to(tl.int64)[:, None] * width + cols[None, :]
    inside = (rows < height)[:, None] & (cols < width)[None, :]
    total = tl.zeros(at.shape, tl.float32)
    for s0 in range(0, splits, BS):
        split = (s0 + tl.arange(0, BS)).to(tl.int64)[:, None, None]
        there = split * height * width + at[None, :, :]
        mask = (split < splits) & inside[None, :, :]
        total += tl.sum(tl.load(ptr + there, mask=mask, other=0.0), 0)
    return total


@triton.jit
@no_type_check
def query_side(query, call):
    """Compute a [BT, RP]; 1 / max(|q|, eps) (1 for dot), phi and its slope at |q|, each [BT]."""
    one = tl.full([query.shape[0]], 1.0, tl.float32)
    inverse = one
    factor = one
    slope = one * 0
    if call.score.scoring != 0:
        rho = tl.sqrt(tl.sum(query * query, 1))
        inverse = 1 / tl.maximum(rho, call.score.eps)
        if call.score.scoring == 2:
            t = tanh(rho)
            factor = call.score.gamma * (1 + call.score.beta * t)
            slope = call.score.gamma * call.score.beta * (1 - t * t)
    return query * (inverse * factor)[:, None], inverse, factor, slope


@triton.jit
@no_type_check
def load_anchors(given, call, rows):
    """Anchors [BC, RP] and the factor [BC] that turns them into b: psi / max(|k|, eps)."""
    anchors = load_block(given.anchors, rows, tl.arange(0, call.RP), call.N * call.H, call.R)
    factor = tl.full(rows.shape, 1.0, tl.float32)
    if call.score.scoring != 0:
        kappa = tl.sqrt(tl.sum(anchors * anchors, 1))
        factor = 1 / tl.maximum(kappa, call.score.eps)
        if call.score.scoring == 2:
            factor = factor * (1 + (kappa - 1) / call.score.p)
    return anchors, factor


@triton.jit
@no_type_check
def unit_backward(grad, vector, norm, inverse, slope_grad, eps):
    """Gradient of ``vector`` through u = v / max(|v|, eps) and |v|.

    grad [B, RP] is that of u, slope_grad [B] that of the norm.
    """
    along = tl.sum(grad * vector, 1) * inverse * inverse
    along = tl.where(norm >= eps, along, 0.0)  # below eps the divisor is a constant
    safe = tl.where(norm > 0, norm, 1.0)
    pull = slope_grad / safe - along * inverse  # at norm 0 the vector is 0, as is its share
    return grad * inverse[:, None] + vector * pull[:, None]
