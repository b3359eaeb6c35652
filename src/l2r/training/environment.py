"""What a run was made with, so that its numbers can be read later."""

import importlib.metadata
import os
import platform
import sys
from typing import Any

import torch
from torch import nn

from l2r.recipes.load import AnyRecipe
from l2r.routers import Router

_PACKAGES = ("l2r-moe", "torch", "transformers", "tokenizers", "numpy", "triton")


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


def describe_machine() -> dict[str, Any]:
    """Versions of the packages that matter, processor, threads and accelerators."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
