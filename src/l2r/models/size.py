"""Parameters of a model with routers: all, those one token meets, and those of the routers."""

from typing import NamedTuple

from torch import nn

from l2r.routers import Router


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
