"""Loss-free balancing: after a step, selection biases move against the load (arXiv 2408.15664)."""

import torch
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.functional import expert_counts
from l2r.routers import Captured, Router
from l2r.routers.observe import unwrapped_model
from l2r.routers.selection_bias import update_selection_bias
from l2r_lab.training.ranks import Ranks


class BiasBalance:
    """The loads of one step, over micro-batches and ranks, and what they do to the biases.

    Raises ValueError when no router of the model has a selection bias.
    """

    def __init__(self, model: nn.Module, speed: float) -> None:
        self.speed = speed
        inner = unwrapped_model(model)  # names are those of what ``capture`` records
        routers = {n: m for n, m in inner.named_modules() if isinstance(m, Router)}
        self.routers = {n: m for n, m in routers.items() if m.selection.bias is not None}
        if not self.routers:
            raise InputError(
                "losses.bias_speed is for routers with a selection bias (kind: sigmoid, or "
                f"router.selection_bias=true); got losses.bias_speed={speed}"
            )
        self.loads: dict[str, Tensor] = {}

    def add(self, captured: Captured) -> None:
        """Count the tokens that each expert got in one forward pass."""
        for name in self.routers:
            for output in captured.outputs.get(name, []):
                load = expert_counts(output.indices, output.logits.shape[1])
                self.loads[name] = self.loads[name] + load if name in self.loads else load

    @torch.no_grad()
    def step(self, ranks: Ranks, halted: Tensor) -> None:
        """Move the biases, unless the flag ``halted`` says not to, and reset the counts."""
        for name, load in self.loads.items():
            router = self.routers[name]
            bias = router.selection.held_bias(router)
            assert bias is not None, name
            before = bias.clone()
            update_selection_bias(bias, ranks.sum(load), speed=self.speed)
            bias.copy_(torch.where(halted, before, bias))
        self.loads.clear()
