"""The router of a name: ``@register_router("name")`` adds one, ``build_router`` builds one.

A router's own file registers it; routers/__init__.py imports these files.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from l2r.errors import InputError, sizes
from l2r.routers.base import Router
from l2r.routers.config import (
    ROUTERS,
    Registered,
    RouterConfig,
    make_config,
    refusals_of,
    registered,
)

R = TypeVar("R", bound=type[Router])


def register_router(name: str, **fixed: Any) -> Callable[[R], R]:
    """Class decorator: make a Router subclass available as ``name``.

    The class needs an attribute ``Config``, a frozen dataclass derived from RouterConfig.
    ``fixed`` are fields of that dataclass that the name decides: one class can carry several names.
    Raises ValueError if another class holds the name.
    """

    def register(cls: R) -> R:
        taken = ROUTERS.get(name)
        if taken is not None and _place(taken.router) != _place(cls):
            raise InputError(f"router name {name!r} is taken by {taken.router.__name__}")
        ROUTERS[name] = Registered(cls, cls.Config, fixed)
        return cls

    return register


def _place(cls: type) -> tuple[str, str]:
    """Where a class is defined; one that is defined again, as in a notebook, replaces the first."""
    return cls.__module__, cls.__qualname__


def build_router(
    kind: str | RouterConfig,
    *,
    hidden_size: int,
    num_experts: int,
    top_k: int,
    **options: Any,
) -> Router:
    """Build a router from a name and options, or from a configuration.

    ``build_router("l2r_sips", hidden_size=2048, num_experts=64, top_k=8, rank=2, heads=16)``

    Parameters are float32, also under a half-precision default dtype, or float64 under that one.

    Raises ValueError that names the field, the value and what is allowed.
    """
    config = make_config(kind, **options) if isinstance(kind, str) else kind
    if options and not isinstance(kind, str):
        config = dataclasses.replace(config, **options)
    router_class = registered(config.kind).router
    with _at_least_float32(), sizes(), refusals_of(router_class):
        return router_class(config, hidden_size=hidden_size, num_experts=num_experts, top_k=top_k)


@contextmanager
def _at_least_float32() -> Iterator[None]:
    """A default dtype no narrower than float32 inside the block."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.promote_types(default, torch.float32))
    try:
        yield
    finally:
        torch.set_default_dtype(default)
