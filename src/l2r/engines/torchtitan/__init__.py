"""Our routers as the gate of torchtitan's MoE layers, and its Qwen3 checkpoints with them.

    torchrun ... -m torchtitan.train ... --override.imports \\
        'l2r.engines.torchtitan.l2r_gate={"kind": "l2r_sips", "rank": 2, "heads": 16}'

We decide the logits and the router's initial weights. torchtitan decides everything after the
logits: score function, groups, bias balancing, top-k and normalization; it has no auxiliary
losses. Dispatch, recompute and parallelism are its own too; parameters are named as ours with
underscores for dots. TP, EP and FSDP2 were tried with ``--parallelism.spmd_backend
partial_dtensor``; under the default ``spmd_types`` a gate at TP 2 learns as one process does
without EP, and with EP each rank has its part of the gradient, which the engine sums: that was
not run.

``L2RQwen3StateDictAdapter`` in place of the model's adapter converts checkpoints to and from
Hugging Face Qwen3-MoE models with swapped routers; torchtitan's own drops what it does not know
without a word.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from l2r.engines.engine import Plug, require

require("torchtitan")

from torchtitan.config import override  # noqa: E402
from torchtitan.models.common.linear import Linear  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402


class L2RGate(Module):
    """A gate with logits of ours: input [B, L, D] to [B, L, E]."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """in_features, out_features: D and E. router: dictionary form of a RouterConfig."""

        in_features: int
        out_features: int
        router: dict[str, Any] = field(default_factory=lambda: {"kind": "l2r_sips"})

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.plug = plug_of(config)
        for name, shape in self.plug.parameters.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the part of the router on this rank as our own models initialize it."""
        for name, value in self.plug.draw().items():
            mine = getattr(self, name)
            whole = value.to(mine.device, mine.dtype)
            if isinstance(mine, DTensor):
                whole = distribute_tensor(whole, mine.device_mesh, mine.placements)
            mine.copy_(whole)

    def forward(self, input: Tensor) -> Tensor:
        """Logits in fp32 or wider; of a DTensor a DTensor, cut over tokens as it is."""
        values = {name: getattr(self, name) for name in self.plug.parameters}
        if not isinstance(input, DTensor):
            return self.plug.logits(input, values)
        cuts = input.placements
        supported = all(c.is_replicate() or (isinstance(c, Shard) and c.dim < 2) for c in cuts)
        assert supported, f"tokens are cut or copied, never their entries; got {cuts}"
        # Ranks with different tokens have a part of the gradient of every parameter.
        parts = [Replicate() if cut.is_replicate() else Partial() for cut in cuts]
        local = {name: v.to_local(grad_placements=parts) for name, v in values.items()}
        logits = self.plug.logits(input.to_local(grad_placements=cuts), local)
        return DTensor.from_local(logits, input.device_mesh, cuts, run_check=False)


@override(  # type: ignore[untyped-decorator]
    target=Linear.Config, fqns=["*.moe.router.gate"], description="L2R routers"
)
def l2r_gate(config: Linear.Config, **router: Any) -> L2RGate.Config:
    """Replace the gates; ``router`` are the fields of a RouterConfig, ``kind`` among them."""
    gate = L2RGate.Config(
        in_features=config.in_features,
        out_features=config.out_features,
        router=router or {"kind": "l2r_sips"},
    )
    plan = config.sharding_config
    if plan is not None:
        layouts = dict.fromkeys(plug_of(gate, seed=0).parameters, plan.state_shardings["weight"])
        gate.sharding_config = replace(plan, state_shardings=layouts)
    return gate


def plug_of(config: L2RGate.Config, *, seed: int | None = None) -> Plug:
    """Return the router of a configuration. Experts are chosen elsewhere, so all may be."""
    n, sizes = config.out_features, {"hidden_size": config.in_features}
    return Plug(config.router, seed=seed, num_experts=n, top_k=n, **sizes)
