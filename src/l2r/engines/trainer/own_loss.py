"""The balance loss that a model of transformers, or TRL's trainer of it, adds by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_NAMES = ("router_aux_loss_coef", "aux_loss_coef")  # TRL had the second before 1.0


class OwnLossWeights:
    """Weights of the balance losses that a training adds without our doing.

    A model keeps the weight as an attribute, its wrappers read a configuration, and TRL's trainers
    add the loss by a weight of their own.
    """

    def __init__(self, trainer: Any, model: nn.Module) -> None:
        holders: dict[int, Any] = {id(trainer): trainer}
        for module in model.modules():
            config = getattr(module, "config", None)
            for holder in (module, config, *_parts(config)):
                holders[id(holder)] = holder
        self._holders = list(holders.values())

    @contextmanager
    def off(self) -> Iterator[None]:
        """Weights of 0 inside the block; the losses themselves are computed and logged."""
        before = [
            (holder, name, vars(holder)[name])
            for holder in self._holders
            for name in _NAMES
            if isinstance(getattr(holder, "__dict__", {}).get(name), int | float)
        ]
        try:
            for holder, name, _ in before:
                holder.__dict__[name] = 0.0
            yield
        finally:
            for holder, name, value in before:
                holder.__dict__[name] = value


def _parts(config: Any) -> list[Any]:
    """List the configurations inside a configuration, as those of a text model."""
    held = getattr(config, "__dict__", {})  # a dict of a module of one's own has none
    return [value for value in held.values() if hasattr(value, "to_dict")]
