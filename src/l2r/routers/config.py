"""What every router configuration shares: its fields, their checks and the plain-dict form."""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Fields that every router understands.

    normalize_weights: make the k weights of a token sum to 1 (off, as in OLMoE and the paper).
    temperature: tau of Eq. 2; the logits a router returns are already divided by it.
    learn_temperature: make log tau a parameter.
    dtype: smallest dtype the router computes in, whatever autocast says.

    A field that only some values of another field read is named in ``read_with``, field -> {other:
    its values}; beside other values it must keep its default, so that no setting is without effect.
    """

    read_with: ClassVar[Mapping[str, Mapping[str, tuple[object, ...]]]] = {}

    normalize_weights: bool = False
    temperature: float = 1.0
    learn_temperature: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_types(self)
        check(math.isfinite(self.temperature) and self.temperature > 0, self, "temperature", "> 0")
        check(self.dtype in DTYPES, self, "dtype", f"one of {', '.join(DTYPES)}")
        check_read(self)

    @property
    def kind(self) -> str:
        """Registered name of the router that this configuration builds, e.g. ``l2r_sips``."""
        from l2r.routers.registry import kind_of

        return kind_of(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain dict with ``kind`` first; ``from_dict`` reads it back."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "RouterConfig":
        """Configuration from ``to_dict``'s form. Raises ValueError for unknown kinds or fields."""
        from l2r.routers.registry import make_config

        options = dict(values)
        if not isinstance(options.get("kind"), str):
            raise ValueError(
                "kind is missing from the router configuration, or is not a name; "
                "add kind: l2r_sips"
            )
        return make_config(options.pop("kind"), **options)


def check_types(config: RouterConfig) -> None:
    """Raise ValueError for a field whose value is not of its declared type."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        if get_origin(hint) is Literal:
            *others, last = get_args(hint)
            check(value in get_args(hint), config, field.name, f"{', '.join(others)} or {last}")
            continue
        kinds = set(get_args(hint) or (hint,))
        if float in kinds:
            kinds.add(int)
        if not isinstance(value, tuple(kinds)) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(f"{field.name} must be of type {names}; got {field.name}={value!r}")
        if isinstance(value, float):
            check(math.isfinite(value), config, field.name, "finite")


def check_read(config: RouterConfig) -> None:
    """Raise ValueError for a field off its default that nothing reads beside the other values."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for field, conditions in config.read_with.items():
        for other, values in conditions.items():
            given, beside = getattr(config, field), getattr(config, other)
            if given != defaults[field] and beside not in values:
                wanted = " or ".join(map(repr, values))
                raise ValueError(
                    f"{field} is read only with {other}={wanted}; "
                    f"got {field}={given!r} with {other}={beside!r}; leave {field} out"
                )


def check(condition: bool, config: object, field: str, allowed: str) -> None:
    """Raise ValueError that names the field, its value and what is allowed."""
    if not condition:
        raise ValueError(f"{field} must be {allowed}; got {field}={getattr(config, field)!r}")


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: `` (did you mean 'rank'?)``, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
