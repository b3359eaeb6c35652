"""Routers under FSDP2 whose weights stay in float32 while the layers compute in bfloat16."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.func import functional_call

from l2r.errors import InputError
from l2r.functional.autocast import without_autocast
from l2r.hf.swap.sites import Site, running_sites
from l2r.routers import Router
from l2r.routers.observe import more_inputs

# Gradients are reduced in the dtype of the weights.
FLOAT32 = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=False)


def shard_routers(model: nn.Module, mesh: DeviceMesh | None = None) -> list[str]:
    """Shard every router over ``mesh`` by itself, with weights in float32; returns their paths.

    Call it before ``fully_shard`` of the layers: the bfloat16 policy of a layer rounds the weights
    of what is in it, and a rounded router chooses other experts. ``model`` has routers of ours,
    swapped ones or those of a supported family; a family's own then compute in float32 too, and
    give the block weights in the dtype that it gets without this call. ``mesh`` is the layers';
    None is one of all ranks. Raises ValueError where layers are sharded already, and as
    ``router_sites`` where there is no router.
    """
    sites = running_sites(model)
    sharded = [path for path, part in model.named_modules() if isinstance(part, FSDPModule)]
    for site in sites:
        around = [p for p in sharded if p == "" or f"{site.path}.".startswith(f"{p}.")]
        if around:
            raise InputError(
                "shard_routers must come before fully_shard of what holds the routers; "
                f"{around[0] or 'the model'} is sharded already"
            )
    for site in sites:
        if isinstance(site.router, Router):
            site.router.lift_scalars()
        else:
            _compute_in_float32(site.router, **site.sizes)
        _keep_block_bias(model, site)
        fully_shard(site.router, mesh=mesh, mp_policy=FLOAT32)
    return [site.path for site in sites]


def _compute_in_float32(router: nn.Module, *, hidden_size: int, num_experts: int, **_: int) -> None:
    """Let a family's own router compute in float32 on whatever it is given, autocast or not.

    Its logits stay so. Its weights get the dtype of the states in families where they have it in a
    model of half precision; in others they are in float32 there too.
    """
    plain: Callable[..., Any] = router.forward
    rounds = _weights_follow_states(router, hidden_size, num_experts)

    @wraps(plain)
    def forward(x: Tensor, *rest: Any, **named: Any) -> Any:
        with without_autocast(x.device):
            logits, weights, indices = plain(_widened(x), *map(_widened, rest), **named)
        return logits, weights.to(x.dtype) if rounds else weights, indices

    router.forward = forward


def _widened(value: Any) -> Any:
    half = isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < 4
    return value.float() if half else value


def _weights_follow_states(router: nn.Module, hidden_size: int, num_experts: int) -> bool:
    """Say whether a router in bfloat16 gives weights in bfloat16: one token on the meta device."""
    tensors = {
        name: torch.empty_like(value, device="meta", dtype=torch.bfloat16)
        for name, value in router.named_parameters()
    }
    for name, value in router.named_buffers():
        tensors[name] = torch.empty_like(value, device="meta")
    named = inspect.signature(router.forward).parameters
    more = {name: torch.empty(num_experts, device="meta") for name in named if "bias" in name}
    for name in set(more_inputs(router)) - more.keys():  # token ids
        more[name] = torch.empty(1, dtype=torch.int64, device="meta")
    x = torch.empty(1, 1, hidden_size, device="meta", dtype=torch.bfloat16)
    _, weights, _ = functional_call(router, tensors, (x,), more)
    return bool(weights.dtype == torch.bfloat16)


def _keep_block_bias(model: nn.Module, site: Site) -> None:
    """Make a selection bias that the block has as a parameter a buffer, which FSDP leaves alone.

    It is under the same name, and was never trained.
    """
    block = model.get_submodule(site.path.rpartition(".")[0])
    for name, value in [*block.named_parameters(recurse=False)]:
        if site.selection.block_bias and name.endswith("bias") and not value.requires_grad:
            delattr(block, name)
            block.register_buffer(name, value.detach())
