"""Modules whose parameters a router reads, while they run."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook


class Holder(nn.Module):
    """Holds parameters of the router around it, which runs inside this module's forward.

    A fused kernel takes the tensors of several modules at once. Offload, sharding and adapters
    work by hooks that bring a module's tensors for its own forward, and for the backward of what
    it returns. A router that ran outside would find them absent, or without their adapters.
    """

    def forward(self, x: Tensor, run: Callable[[Tensor], Any]) -> Any:
        """Call ``run(x)``, what is left of the router."""
        return run(x)


class BareLinear(Holder):
    """Linear weights that quantizers must not find: ``weight`` [O, D] and maybe ``bias`` [O].

    The router computes with them itself. Serving engines and quantizers replace every nn.Linear
    they find, which would take the weight away or round it; the keys, and the initial values, are
    those of nn.Linear.
    """

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(D)."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.weight.shape[1])
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        return (
            f"in_features={in_features}, out_features={out_features}, bias={self.bias is not None}"
        )


class InputNormGain(Holder):
    """Learned gain [D] of the RMSNorm before W_q; the norm itself runs inside the kernel."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


def holders_that_take_part(router: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """Holders of a router, by name, whose call does more than call ``run``.

    A hook, an adapter around it, a parametrization inside it or a replaced forward does: these
    are the ways by which other libraries bring tensors. So does a global hook of torch. One
    function and no property of each holder, since its time is part of every decoding step.
    """
    modules, found = router._modules, []
    always = _has_any_global_hook()  # type: ignore[no-untyped-call]
    for name in names:
        holder = modules.get(name)  # None where a configuration has no such part
        if holder is None:
            continue
        has = holder.__dict__
        if (
            always
            or has["_forward_pre_hooks"]
            or has["_forward_hooks"]
            or has["_backward_hooks"]
            or has["_backward_pre_hooks"]
            or has["_modules"]
            or "forward" in has
            or type(holder).forward is not Holder.forward
        ):
            found.append(holder)
    return found


def parameters(dtype: torch.dtype, *places: tuple[nn.Module | None, str]) -> Any:
    """Return ``module.name`` in a dtype for each place: a parameter, or what stands in its place.

    None where there is no module. One call for all, that reads without ``nn.Module.__getattr__``.
    """
    found: list[Tensor | None] = []
    for module, name in places:
        tensor: Any = None
        if module is not None:
            tensor = module._parameters.get(name)
            if tensor is None:
                tensor = getattr(module, name)
            if tensor.dtype is not dtype:
                tensor = tensor.to(dtype)
        found.append(tensor)
    return tuple(found)
