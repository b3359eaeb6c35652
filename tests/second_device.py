"""A second device on a machine without one: its tensors compute here, and mix with none from here.

What would fail on a GPU for a tensor that was left on the CPU fails here. Numbers are the CPU's.
torch's device ``lazy`` stands for it, which a CPU build lets tensors name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from l2r.kernels.dispatch import implementation

DEVICE = torch.device("lazy:0")
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
_JOINED = (torch.ops.aten.stack.default, torch.ops.aten.cat.default)  # take no number from here
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)  # by indices from here


class Away(Tensor):
    """A tensor of the second device, with the one ``here`` that computes for it."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "Away":
        away = Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=DEVICE,
            requires_grad=here.requires_grad,
        )
        away.here = here
        return away

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: "Away") -> None:
        Tensor.data.__set__(self, value)
        self.here = value.here

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None) -> "Away":
        return Away(torch.tensor(data, dtype=dtype or self.dtype))

    def tolist(self) -> Any:
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """``torch.tensor`` makes its tensor before an operation is seen."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor) and _is_away(kwargs.get("device")):
            return Away(function(*args, **{k: v for k, v in kwargs.items() if k != "device"}))
        return function(*args, **kwargs)


def _is_away(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _run(function: Any, args: Any, kwargs: Any) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    away = any(isinstance(tensor, Away) for tensor in tensors)
    if away and function not in (*_COPIES, *_INDEXED):
        joined = function in _JOINED
        left = [t for t in tensors if not isinstance(t, Away) and (joined or t.dim() > 0)]
        if left:
            raise RuntimeError(f"{function} has tensors on {DEVICE} and on {left[0].device}")
    to = kwargs.get("device")
    if _is_away(to):
        if kwargs.get("generator") is not None:
            raise RuntimeError(f"{function} on {DEVICE} has a generator of the cpu")
        kwargs = {**kwargs, "device": torch.device("cpu")}
    own_args, own_kwargs = tree_map(_here, args), tree_map(_here, kwargs)
    if away and function is torch.ops.aten.histc.default:  # of integers on a GPU alone
        result = function(own_args[0].double(), *own_args[1:], **own_kwargs).to(args[0].dtype)
    else:
        result = function(*own_args, **own_kwargs)
    if function is torch.ops.aten.copy_.default:
        return args[0]
    if not (_is_away(to) if to is not None else away):
        return result
    wrapped = tree_map(lambda leaf: Away(leaf) if isinstance(leaf, Tensor) else leaf, result)
    return return_and_correct_aliasing(function, args, kwargs, wrapped) if away else wrapped


def _here(leaf: Any) -> Any:
    return leaf.here if isinstance(leaf, Away) else leaf


@contextmanager
def second_device() -> Iterator[torch.device]:
    """Give the device while tensors can be on it; routers run plain code."""
    enabled = torch.is_autocast_enabled
    no_autocast = patch.object(
        torch, "is_autocast_enabled", lambda kind="cpu": kind != DEVICE.type and enabled(kind)
    )
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with _Operations(), _Factories(), no_autocast, implementation("plain"):
            yield DEVICE
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
