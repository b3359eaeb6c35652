"""Parameters and floating-point operations of a ViT, counted on the meta device."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from l2r.models.size import model_size
from l2r.models.vit import L2rViTConfig, L2rViTForImageClassification
from l2r.routers import Router, router_names


@dataclass(frozen=True)
class VitCost:
    """Counts for one image.

    parameters: all that are stored. active_parameters: those one token meets, k of N experts.
    router_parameters: of all routers. flops: of the matrix products of one forward pass, a
    multiply-add counted as 2. router_flops: the routers' share of them.
    """

    parameters: int
    active_parameters: int
    router_parameters: int
    flops: int
    router_flops: int


def vit_cost(config: L2rViTConfig) -> VitCost:
    """Count a model on the meta device: nothing is allocated, so the full size takes a second."""
    with torch.device("meta"):
        model = L2rViTForImageClassification._from_config(config, attn_implementation="eager")
        side = config.image_size
        height, width = (side, side) if isinstance(side, int) else side
        image = torch.empty(1, config.num_channels, height, width, dtype=torch.bfloat16)
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_mm_flops}
    )
    with counter, torch.no_grad():
        model.eval().to(torch.bfloat16)(image)  # the only dtype of grouped_mm on the meta device
    per_module = counter.get_flop_counts()
    routers = {name: m for name, m in model.named_modules() if isinstance(m, Router)}
    size = model_size(model)
    prefix = type(model).__name__
    return VitCost(
        parameters=size.parameters,
        active_parameters=size.active,
        router_parameters=size.routers,
        flops=counter.get_total_flops(),
        router_flops=sum(sum(per_module[f"{prefix}.{name}"].values()) for name in routers),
    )


def vit_s_costs() -> dict[str, VitCost]:
    """The paper's ViT-S, dense and with every router of the paper."""
    configs = {"dense": L2rViTConfig(num_labels=1000, moe_layers=[])}
    for kind in router_names():
        configs[kind] = L2rViTConfig(num_labels=1000, router={"kind": kind})
    return {name: vit_cost(config) for name, config in configs.items()}


def _grouped_mm_flops(rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Every row meets the matrix of one expert: rows [S, I], weight [N, I, O]."""
    return 2 * rows[0] * rows[1] * weight[2]
