"""Which patches of some images go to which expert: the file patches.npz."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Integer, Shaped, UInt8

from l2r.runs.arrays import Arrays


@dataclass(frozen=True)
class PatchRouting(Arrays):
    """Routing of the patches of B images in L layers; patches form a grid of P x Q.

    layers: their names. experts: those chosen, the heaviest first. weights: what their outputs are
    multiplied by. class_token: experts of the class token. predictions: the class that the model
    guesses, besides labels; both are positions in classes. num_experts: N.
    """

    what: ClassVar = "patch routing"

    layers: Shaped[np.ndarray, " L"]
    experts: Integer[np.ndarray, "L B P Q K"]
    weights: Float[np.ndarray, "L B P Q K"]
    class_token: Integer[np.ndarray, "L B K"]
    predictions: Integer[np.ndarray, " B"]
    num_experts: Integer[np.ndarray, ""]
    images: UInt8[np.ndarray, "B height width C"]
    labels: Integer[np.ndarray, " B"]
    classes: Shaped[np.ndarray, " G"]
