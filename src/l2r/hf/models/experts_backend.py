"""Our dispatch as an ``experts_implementation`` of transformers, under the name ``l2r``.

``register_experts()`` once, then ``from_pretrained(..., experts_implementation="l2r")``: the
router's tokens go out and come back in one pass each, forward and backward, and the [T, K, D] copy
of transformers' own grouped_mm is never made. Experts with biases, transposed weights, no gate, a
norm after them or split over devices run transformers' own grouped_mm.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from l2r.moe.token_dispatch import assign

NAME = "l2r"


def register_experts() -> str:
    """Make the implementation known to transformers; returns its name."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, l2r_experts_forward)
    return NAME


@contextmanager
def computing_experts(model: Any, name: str) -> Iterator[None]:
    """Compute experts by an implementation of transformers inside the block; their own afterwards.

    Exporters take ``batched_mm`` alone, and ``eager`` alone computes in float64.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    configs = {id(part.config): part.config for part in parts}.values()
    before = [config._experts_implementation for config in configs]
    model.set_experts_implementation(name)
    try:
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            config._experts_implementation_internal = own


def l2r_experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Weighted sum of the chosen experts' outputs, [T, D]."""
    normed = getattr(self, "has_post_expert_norm", False)  # transformers >= 5.20
    plain = self.has_gate and not (
        self.has_bias or self.is_transposed or normed or self._is_expert_parallel
    )
    if not plain:
        own: Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return own
    x = hidden_states.to(self.gate_up_proj.dtype)
    plan = assign(x, top_k_index, self.num_experts)
    hidden = self._apply_gate(plan.linear(plan.spread(x), self.gate_up_proj))
    outputs = plan.linear(hidden, self.down_proj)
    return plan.combine(outputs, top_k_weights).to(hidden_states.dtype)
