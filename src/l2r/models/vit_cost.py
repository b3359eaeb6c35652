"""Parameters and floating-point operations of a ViT, counted on the meta device."""

from dataclasses import dataclass

import torch

from l2r.models.flops import forward_flops
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
    flops = forward_flops(model, {"pixel_values": image})
    size = model_size(model)
    return VitCost(
        parameters=size.parameters,
        active_parameters=size.active,
        router_parameters=size.routers,
        flops=flops[""],
        router_flops=sum(flops[n] for n, m in model.named_modules() if isinstance(m, Router)),
    )


def vit_s_costs() -> dict[str, VitCost]:
    """The paper's ViT-S, dense and with every router of the paper."""
    configs = {"dense": L2rViTConfig(num_labels=1000, moe_layers=[])}
    for kind in router_names():
        configs[kind] = L2rViTConfig(num_labels=1000, router={"kind": kind})
    return {name: vit_cost(config) for name, config in configs.items()}
