"""The task loss of every step, averaged on the device between two records."""

import torch
from torch import Tensor

from l2r.training.ranks import Ranks


class MeanLoss:
    """Sum of the task losses since the last reading; no step waits for the device."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._sum = torch.zeros((), dtype=torch.float64, device=ranks.device)
        self._steps = 0

    def add(self, loss: Tensor) -> None:
        """The loss of one step on this rank."""
        self._sum += loss
        self._steps += 1

    def read(self) -> dict[str, float]:
        """``ce``, the mean over steps and ranks, and ``steps``, their number; then start anew.

        Empty where no step was added. Every rank must call this.
        """
        if not self._steps:
            return {}
        total, steps = float(self.ranks.sum(self._sum) / self.ranks.world), self._steps
        self._sum.zero_()
        self._steps = 0
        return {"ce": total / steps, "steps": steps}
