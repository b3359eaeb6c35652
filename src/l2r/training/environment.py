"""What a run was made with, so that its numbers can be read later."""

import sys
from typing import Any

from torch import nn

from l2r.machine import describe_machine
from l2r.recipes.load import AnyRecipe
from l2r.routers import Router


def describe_environment(
    model: nn.Module, recipe: AnyRecipe, data: dict[str, Any], world: int
) -> dict[str, Any]:
    """Versions, hardware, command, data and parameter counts."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    return {
        **describe_machine(),
        "command": " ".join(sys.argv),
        "ranks": world,
        "router": recipe.router_config().kind,
        "parameters": sum(p.numel() for p in model.parameters()),
        "router_parameters": sum(p.numel() for r in routers for p in r.parameters()),
        "linear_router_parameters": sum(r.num_experts * r.hidden_size for r in routers),
        "moe_layers": len(routers),
        "data": data,
    }
