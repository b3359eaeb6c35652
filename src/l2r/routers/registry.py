"""Names of routers: ``@register_router("name")`` adds one, ``build_router`` builds one."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from l2r.routers.config import RouterConfig, nearest
from l2r.routers.names import PAPER_ROUTERS

if TYPE_CHECKING:
    from l2r.routers.base import Router

R = TypeVar("R", bound="type[Router]")

_registry: dict[str, tuple["type[Router]", dict[str, Any]]] = {}


def register_router(name: str, **preset: Any) -> Callable[[R], R]:
    """Class decorator: make a Router subclass available as ``name``.

    The class needs an attribute ``Config``, a frozen dataclass derived from RouterConfig.
    ``preset`` fixes fields of that dataclass, so that one class can carry several names.
    Raises ValueError if another class holds the name.
    """

    def register(cls: R) -> R:
        holder = _registry.get(name)
        if holder is not None and holder[0].__qualname__ != cls.__qualname__:
            raise ValueError(f"router name {name!r} is taken by {holder[0].__name__}")
        _registry[name] = (cls, preset)
        return cls

    return register


def router_names() -> list[str]:
    """Registered names: the paper's six in the paper's order, then others by name."""
    others = sorted(set(_registry) - set(PAPER_ROUTERS))
    return [*PAPER_ROUTERS, *others]


def make_config(kind: str, **options: Any) -> RouterConfig:
    """Configuration of the router ``kind``; raises ValueError for unknown names or fields."""
    cls, preset = _registered(kind)
    fields = [f.name for f in dataclasses.fields(cls.Config)]
    for name in options:
        if name not in fields:
            known = options_of(kind)
            raise ValueError(
                f"router {kind!r} has no option {name!r}{nearest(name, known)}; "
                f"it takes: {', '.join(known)}"
            )
    for name, value in preset.items():
        if options.get(name, value) != value:
            raise ValueError(f"router {kind!r} fixes {name}={value!r}; got {options[name]!r}")
    return cls.Config(**{**preset, **options})


def options_of(kind: str) -> list[str]:
    """Options that the router ``kind`` reads: not those that its name fixes or leaves without use.

    Raises ValueError for an unknown name.
    """
    cls, preset = _registered(kind)
    unread = {
        field
        for field, conditions in cls.Config.read_with.items()
        if any(preset.get(other, values[0]) not in values for other, values in conditions.items())
    }
    fields = [f.name for f in dataclasses.fields(cls.Config)]
    return [name for name in fields if name not in preset and name not in unread]


def _registered(kind: str) -> tuple["type[Router]", dict[str, Any]]:
    if not isinstance(kind, str) or kind not in _registry:
        hint, known = nearest(str(kind), _registry), ", ".join(router_names())
        raise ValueError(f"unknown router {kind!r}{hint}; known: {known}")
    return _registry[kind]


def router_class(kind: str) -> "type[Router]":
    """Class registered as ``kind``; raises ValueError for an unknown name."""
    return _registered(kind)[0]


def kind_of(config: RouterConfig) -> str:
    """Registered name whose class and preset match the configuration."""
    for name, (cls, preset) in _registry.items():
        if cls.Config is type(config) and all(getattr(config, k) == v for k, v in preset.items()):
            return name
    raise ValueError(f"no router is registered for {type(config).__name__}; use @register_router")


def build_router(
    kind: str | RouterConfig,
    *,
    hidden_size: int,
    num_experts: int,
    top_k: int,
    **options: Any,
) -> "Router":
    """Build a router from a name and options, or from a configuration.

    ``build_router("l2r_sips", hidden_size=2048, num_experts=64, top_k=8, rank=2, heads=16)``

    Raises ValueError that names the field, the value and what is allowed.
    """
    config = make_config(kind, **options) if isinstance(kind, str) else kind
    if options and not isinstance(kind, str):
        config = dataclasses.replace(config, **options)
    cls, _ = _registry[kind_of(config)]
    return cls(config, hidden_size=hidden_size, num_experts=num_experts, top_k=top_k)
