"""Exponential moving average of the weights, for evaluation besides the weights themselves."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class WeightAverage:
    """Average of the parameters over the steps; buffers are the newest.

    The decay starts small and grows to ``decay``: min(decay, (1 + step) / (10 + step)), so that
    the initial weights do not linger. Works on whole and on sharded parameters.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.buffers = {n: b.detach().clone() for n, b in model.named_buffers()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights after ``step`` steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        values = [p.detach() for p in model.parameters()]
        torch._foreach_lerp_(list(self.parameters.values()), values, 1 - decay)
        for name, buffer in model.named_buffers():
            self.buffers[name].copy_(buffer)

    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint, under flat names."""
        values = {**self.parameters, **self.buffers}
        return {f"average.{name.removeprefix('module.')}": v for name, v in values.items()}

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Give the model averaged weights inside the block, its own again afterwards."""
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    @torch.no_grad()
    def _exchange(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward leaves whole copies behind, which would go stale
        held = {**self.parameters, **self.buffers}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            own = tensor.detach().clone()
            tensor.detach().copy_(held[name])
            held[name].copy_(own)
