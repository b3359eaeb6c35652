"""What a run was made of: versions, hardware, command, data and the sizes of its model."""

import sys
from typing import Any

from torch import nn

from l2r.machine import describe_machine
from l2r.routers import Router
from l2r.training.recipes.load import AnyRecipe


def environment(
    model: nn.Module, recipe: AnyRecipe, data: dict[str, Any], world: int
) -> dict[str, Any]:
    """Content of environment.json for a run on ``world`` ranks; ``data`` are facts of its task."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    return {
        **describe_machine(),
        "command": " ".join(sys.argv),
        "ranks": world,
        "router": recipe.router.kind,
        "parameters": sum(p.numel() for p in model.parameters()),
        "router_parameters": sum(p.numel() for r in routers for p in r.parameters()),
        "linear_router_parameters": sum(r.num_experts * r.hidden_size for r in routers),
        "moe_layers": len(routers),
        "data": data,
    }


def size_note(facts: dict[str, Any]) -> str:
    """A line where routers have more parameters than linear ones would; else nothing."""
    own, linear = facts["router_parameters"], facts["linear_router_parameters"]
    if own <= linear:
        return ""
    return (
        f"the routers have {own:,} parameters, more than the {linear:,} of linear routers in "
        "their place"
    )
