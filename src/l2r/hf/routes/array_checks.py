"""Checks of the arrays of which routes consist; each raises ValueError in one line.

Shape letters: T tokens with a route, S sequences, W width of a padded batch, L layers with a
router, K experts per token.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from l2r.errors import InputError
from l2r.hf.routes.fingerprint import Fingerprint

NO_ROUTE = -1  # in padded arrays: the token chooses for itself


def whole_numbers(name: str, values: Any) -> Int[np.ndarray, " S"]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size) or (array < 0).any():
        raise InputError(
            f"{name} must be a list of whole numbers >= 0; "
            f"got {array.dtype} of shape {list(array.shape)}"
        )
    return array.astype(np.int64)


def check_positions(
    positions: Int[np.ndarray, " T"], counts: Int[np.ndarray, " S"], lengths: Int[np.ndarray, " S"]
) -> None:
    total = int(counts.sum())
    if len(positions) != total:
        raise InputError(f"positions must be {total}, one per route; got {len(positions)}")
    sequence = np.repeat(np.arange(len(counts)), counts)
    falls = (np.diff(positions) <= 0) & (np.diff(sequence) == 0)
    if falls.any() or (positions >= lengths[sequence]).any():
        raise InputError(
            "positions must rise within each sequence and lie below its length; "
            f"got positions={positions.tolist()!s:.60}"
        )


def check_whole_routes(
    experts: Int[np.ndarray, "S W L K"], tokens: Bool[np.ndarray, "S W"], fingerprint: Fingerprint
) -> None:
    none = experts == NO_ROUTE
    part = tokens & none.any(axis=(2, 3)) & ~none.all(axis=(2, 3))
    if part.any():
        sequence, column = (int(i) for i in np.argwhere(part)[0])
        token = int(tokens[sequence, :column].sum())
        layer = int(none[sequence, column].any(axis=1).argmax())
        raise InputError(
            "the experts of a token in all layers must all be -1, or none of them; "
            f"got {experts[sequence, column, layer].tolist()} of sequence {sequence}, "
            f"token {token}, layer {fingerprint.layers[layer]}"
        )


def check_experts(experts: Int[np.ndarray, "T L K"], fingerprint: Fingerprint) -> None:
    outside = (experts < 0) | (experts >= fingerprint.num_experts)
    if outside.any():
        token, layer, _ = (int(i) for i in np.argwhere(outside)[0])
        raise InputError(
            f"experts must be between 0 and {fingerprint.num_experts - 1}; "
            f"got {experts[token, layer].tolist()} of token {token}, "
            f"layer {fingerprint.layers[layer]}"
        )
    ordered = np.sort(experts, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    if twice.any():
        token, layer = (int(i) for i in np.argwhere(twice)[0])
        raise InputError(
            f"a token must choose different experts; got {experts[token, layer].tolist()} "
            f"of token {token}, layer {fingerprint.layers[layer]}"
        )
