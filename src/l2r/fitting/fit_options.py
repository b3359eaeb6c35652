"""Options of a fit and of the training after it; read without torch, before anything is loaded."""

import math
from dataclasses import dataclass

from l2r.errors import InputError


@dataclass(frozen=True)
class FitOptions:
    """updates: optimizer steps per batch of activations, each on all its tokens.

    lr is Adam's and decays to zero with a cosine.
    """

    updates: int = 4
    lr: float = 0.01

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"lr must be > 0; got lr={self.lr}")
        if self.updates < 0:
            raise InputError(f"updates must be >= 0; got updates={self.updates}")


@dataclass(frozen=True)
class JointOptions:
    """Training of everything after the fit, with the paper's losses besides the model's own.

    steps: 0 for none; a tenth of them warm up. balance, z: weights of the auxiliary losses.
    """

    steps: int = 0
    lr: float = 1e-4
    balance: float = 0.01
    z: float = 0.001

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"joint lr must be > 0; got {self.lr}")
        for name in ("steps", "balance", "z"):
            if getattr(self, name) < 0:
                raise InputError(f"joint {name} must be >= 0; got {getattr(self, name)}")
