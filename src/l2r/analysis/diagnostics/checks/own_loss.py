"""The balance loss that a model adds to its own: what passes with it and without it tell."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


@dataclass(frozen=True)
class OwnLoss:
    """weight: of the balance loss. is_on: whether it counts as the model is configured."""

    weight: float
    is_on: bool


class Asked(NamedTuple):
    """Balance loss that a pass returned, None where it did not, and the whole loss."""

    balance: float | None
    whole: float


def own_loss_of(model: Any, config: Any, asked: Sequence[Asked]) -> OwnLoss | None:
    """Find the balance loss of a model from three passes over the same tokens; None without one.

    asked: passes with ``output_router_logits`` as the model has it, off and on; empty for a model
    that cannot be asked, whose attributes then count.
    """
    weight: Any = getattr(model, "router_aux_loss_coef", None)
    if not asked:
        is_on = bool(getattr(config, "output_router_logits", False))
        return None if weight is None else OwnLoss(float(weight), is_on)
    now, off, on = asked
    if not _moves(off, on):
        return None
    if weight is None:  # wrappers read it from the text's configuration
        measured = (on.whole - off.whole) / (on.balance or 1)
        weight = getattr(config, "router_aux_loss_coef", measured)
    return OwnLoss(float(weight), is_on=_moves(off, now))


def _moves(off: Asked, other: Asked) -> bool:
    """Tell whether a pass has a balance loss that the other lacks, or another whole loss."""
    rounding = 16 * torch.finfo(torch.float32).eps * abs(off.whole)
    return other.balance != off.balance or abs(other.whole - off.whole) > rounding
