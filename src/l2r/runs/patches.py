"""Which patches of some images go to which expert: the file patches.npz."""

import io
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int, Shaped, UInt8

from l2r.runs.atomic import write_bytes


@dataclass(frozen=True)
class PatchRouting:
    """Routing of the patches of B images in L layers; patches form a grid of P x Q.

    layers: their names. experts: those chosen, the heaviest first. weights: what their outputs are
    multiplied by. class_token: experts of the class token. predictions: the class that the model
    guesses, beside labels; both are positions in classes. num_experts: N.
    """

    layers: Shaped[np.ndarray, " L"]
    experts: Int[np.ndarray, "L B P Q K"]
    weights: Float[np.ndarray, "L B P Q K"]
    class_token: Int[np.ndarray, "L B K"]
    predictions: Int[np.ndarray, " B"]
    num_experts: Int[np.ndarray, ""]
    images: UInt8[np.ndarray, "B height width C"]
    labels: Int[np.ndarray, " B"]
    classes: Shaped[np.ndarray, " G"]

    def save(self, path: Path) -> None:
        """Write the file whole or not at all."""
        stream = io.BytesIO()
        np.savez_compressed(stream, **{f.name: getattr(self, f.name) for f in fields(self)})
        write_bytes(path, stream.getvalue())


def read_patches(path: Path) -> PatchRouting:
    """Read such a file. Raises ValueError when it is missing or another."""
    try:
        with np.load(path, allow_pickle=False) as data:
            arrays = dict(data)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read patch routing from {path}: {error}") from error
    names = {field.name for field in fields(PatchRouting)}
    if names - set(arrays):
        missing = ", ".join(sorted(names - set(arrays)))
        raise ValueError(f"{path} holds no patch routing: {missing} missing")
    return PatchRouting(**{name: arrays[name] for name in names})
