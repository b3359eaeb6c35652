"""Parameters of a model with routers: all, those one token meets, and those of the routers; and its
floating-point operations, by module.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from l2r.hf.models.vit import L2rViTConfig, L2rViTForImageClassification
from l2r.routers import Router, router_names


class ModelSize(NamedTuple):
    """parameters: all that are stored. active: those one token meets, k of N experts.

    routers: of all routers. linear_routers: what linear routers in their places would have.
    """

    parameters: int
    active: int
    routers: int
    linear_routers: int


def model_size(model: nn.Module) -> ModelSize:
    """Count a model, on the meta device too; embeddings count as active."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    idle = sum(
        (1 - router.top_k / router.num_experts) * _count(layer.experts)  # type: ignore[arg-type]
        for layer in model.modules()
        for router in layer.children()
        if isinstance(router, Router)
    )
    return ModelSize(
        parameters=_count(model),
        active=round(_count(model) - idle),
        routers=sum(_count(router) for router in routers),
        linear_routers=sum(router.num_experts * router.hidden_size for router in routers),
    )


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


class VitCost(NamedTuple):
    """flops: of the matrix products for one image, forward, a multiply-add counted as 2.

    router_flops: the routers' share of them.
    """

    size: ModelSize
    flops: int
    router_flops: int


def vit_cost(config: L2rViTConfig) -> VitCost:
    """Count a model on the meta device: nothing is allocated, so the full size takes a second."""
    model = _on_meta(config)
    flops = forward_flops(model, {"pixel_values": _one_image(config)})
    router_flops = sum(flops[n] for n, m in model.named_modules() if isinstance(m, Router))
    return VitCost(model_size(model), flops[""], router_flops)


def _on_meta(config: L2rViTConfig) -> L2rViTForImageClassification:
    with torch.device("meta"):
        return L2rViTForImageClassification._from_config(config, attn_implementation="eager")


def _one_image(config: L2rViTConfig) -> Tensor:
    side = config.image_size
    height, width = (side, side) if isinstance(side, int) else side
    shape = (1, config.num_channels, height, width)
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def forward_flops(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, int]:
    """FLOPs of matrix products by module name, ``""`` for the whole; a multiply-add counts as 2.

    ``model`` and ``inputs`` are on the meta device; the model becomes bf16, the only dtype of
    grouped_mm there.
    """
    counter = FlopCounterMode(
        display=False, custom_mapping={torch.ops.aten._grouped_mm: _grouped_mm_flops}
    )
    with counter, torch.no_grad():
        model.eval().to(torch.bfloat16)(**inputs)
    counts, root = counter.get_flop_counts(), type(model).__name__
    names = [name for name, _ in model.named_modules() if name]
    by_name = {name: sum(counts.get(f"{root}.{name}", {}).values()) for name in names}
    return {**by_name, "": counter.get_total_flops()}


def vit_s_costs() -> dict[str, VitCost]:
    """Return the paper's ViT-S, dense and with every router of the paper.

    Beside their routers the models are one: the linear one is counted whole, of the others the
    routers.
    """
    linear = vit_cost(L2rViTConfig(num_labels=1000, router={"kind": "linear"}))
    costs = {"dense": vit_cost(L2rViTConfig(num_labels=1000, moe_layers=[])), "linear": linear}
    for kind in router_names():
        config = L2rViTConfig(num_labels=1000, router={"kind": kind})
        model, tokens = _on_meta(config), _tokens(config)
        routers = [module for module in model.modules() if isinstance(module, Router)]
        x = torch.empty(tokens, config.hidden_size, dtype=torch.bfloat16, device="meta")
        router_flops = sum(forward_flops(router, {"x": x})[""] for router in routers)
        flops = linear.flops - linear.router_flops + router_flops
        costs[kind] = VitCost(model_size(model), flops, router_flops)
    return costs


def _tokens(config: L2rViTConfig) -> int:
    """Patches of an image and the class token."""
    *_, height, width = _one_image(config).shape
    return 1 + (height // config.patch_size) * (width // config.patch_size)


def _grouped_mm_flops(rows: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
    """Every row meets the matrix of one expert: rows [S, I], weight [N, I, O]."""
    return 2 * rows[0] * rows[1] * weight[2]
