"""Router configurations: shared fields, their checks, the table of names, the plain-dict form.

Routers from outside of this package are imported as the user's environment says (L2R_IMPORT, entry
points), which registers them. Nothing read from a checkpoint or a recipe chooses what is imported.
"""

import dataclasses
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args, get_origin, get_type_hints

from l2r.errors import InputError
from l2r.files.shared_settings import PAPER_ROUTERS, ReadWith, check_read
from l2r.files.wording import known_as, nearest
from l2r.laboratory import PACKAGE, has_laboratory

_VARIABLE, _GROUP = "L2R_IMPORT", "l2r.routers"
DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Fields that every router understands.

    normalize_weights: make the k weights of a token sum to 1 (off, as in OLMoE and the paper).
    selection_bias: add a bias [N] to the scores, softmax or sigmoid, when experts are chosen, and
    never to the weights. No gradient reaches it: ``update_selection_bias`` or losses.bias_speed
    moves it against the load (loss-free balancing, arXiv 2408.15664).
    temperature: tau of Eq. 2; the logits a router returns are already divided by it.
    learn_temperature: make log tau a parameter.
    dtype: smallest dtype the router computes in, whatever autocast says.

    ``read_with`` names the fields that are used only with some values of another field, as field ->
    {other: its values}. With other values they must keep their defaults: no setting is ignored.
    """

    read_with: ClassVar[ReadWith] = {}

    normalize_weights: bool = False
    selection_bias: bool = False
    temperature: float = 1.0
    learn_temperature: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_types(self)
        check(math.isfinite(self.temperature) and self.temperature > 0, self, "temperature", "> 0")
        check(self.dtype in DTYPES, self, "dtype", f"one of {', '.join(DTYPES)}")
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        check_read(self, self.read_with, defaults)

    @property
    def kind(self) -> str:
        """Registered name of the router that this configuration builds, e.g. ``l2r_sips``."""
        for name, entry in ROUTERS.items():
            if entry.config is type(self) and self._has(entry.fixed):
                return name
        raise InputError(f"no router is registered for {type(self).__name__}; use @register_router")

    def _has(self, values: Mapping[str, Any]) -> bool:
        return all(getattr(self, name) == value for name, value in values.items())

    def to_dict(self) -> dict[str, Any]:
        """Plain dict with ``kind`` first; ``from_dict`` reads it back."""
        return {"kind": self.kind, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "RouterConfig":
        """Read ``to_dict``'s form. Raises ValueError for unknown kinds or fields."""
        options = dict(values) if isinstance(values, Mapping) else {}
        if not isinstance(options.get("kind"), str):
            raise InputError(
                "kind is missing from the router configuration, or is not a name; "
                "add kind: l2r_sips"
            )
        return make_config(options.pop("kind"), **options)


class Registered(NamedTuple):
    """A registered router: its class, that of its configuration, fields that the name fixes."""

    router: type[Any]
    config: type[RouterConfig]
    fixed: Mapping[str, Any]


ROUTERS: dict[str, Registered] = {}  # by name; register_router fills it


def router_names() -> list[str]:
    """Return registered names: the paper's six in the paper's order, then others by name.

    With the laboratory installed its routers are among them.
    """
    _import_laboratory()
    return [*PAPER_ROUTERS, *sorted(set(ROUTERS) - set(PAPER_ROUTERS))]


def make_config(kind: str, **options: Any) -> RouterConfig:
    """Configure the router ``kind``; raises ValueError for unknown names or fields."""
    entry = registered(kind)
    fields = [f.name for f in dataclasses.fields(entry.config)]
    for name in options:
        if name not in fields:
            allowed = options_of(kind)
            raise InputError(
                f"{kind!r} has no option {name!r}{nearest(name, [*allowed, 'kind'])}; "
                f"it takes: {', '.join(allowed)}"
            )
    for name, value in entry.fixed.items():
        if options.get(name, value) != value:
            raise InputError(f"{kind!r} fixes {name}={value!r}; got {options[name]!r}")
    with refusals_of(entry.config):
        return entry.config(**{**entry.fixed, **options})


@contextmanager
def refusals_of(kind: type[Any]) -> Iterator[None]:
    """Turn a ValueError of a user's own router or configuration, inside the block, into ours."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, InputError) or kind.__module__.partition(".")[0] in ("l2r", PACKAGE):
            raise
        raise InputError(str(error)) from error


def options_of(kind: str) -> list[str]:
    """Options that the router ``kind`` reads: not those that its name fixes or leaves without use.

    Raises ValueError for an unknown name.
    """
    _, config, fixed = registered(kind)
    unread = {
        field
        for field, conditions in config.read_with.items()
        if any(other in fixed and fixed[other] not in v for other, v in conditions.items())
    }
    fields = [f.name for f in dataclasses.fields(config)]
    return [name for name in fields if name not in fixed and name not in unread]


def _import_laboratory() -> None:
    """Register the laboratory's routers, where it is installed."""
    if has_laboratory():
        importlib.import_module(f"{PACKAGE}.routers")


def registered(kind: str) -> Registered:
    """Entry of a name in ``ROUTERS``, in either spelling; raises ValueError for an unknown one.

    A name that is not there is looked for in the laboratory and in the user's files too.
    """
    if isinstance(kind, str):
        given, kind = kind, known_as(kind, ROUTERS)
        for import_more in (_import_laboratory, import_named_modules, import_entry_points):
            if kind not in ROUTERS:
                import_more()
                kind = known_as(given, ROUTERS)
    if not isinstance(kind, str) or kind not in ROUTERS:
        hint, names = nearest(str(kind), ROUTERS), ", ".join(router_names())
        raise InputError(
            f"unknown router {kind!r}{hint}; known: {names}; for one of your own, import the file "
            "that registers it, or name its module in L2R_IMPORT"
        )
    return ROUTERS[kind]


def import_named_modules() -> None:
    """Import the modules that L2R_IMPORT names, separated by commas.

    The working folder counts, after every other place: it stands at the end of ``sys.path`` from
    then on. Raises ValueError for a module that cannot be imported.
    """
    names = [name.strip() for name in os.environ.get(_VARIABLE, "").split(",")]
    for name in filter(None, names):
        _load(f"{_VARIABLE} names {name!r}", partial(_import_from_here_too, name))


def import_entry_points() -> None:
    """Load the entry points ``l2r.routers`` of installed packages.

    Raises ValueError for one that cannot be loaded.
    """
    for point in _entry_points():
        _load(f"a package has the entry point {point.name!r} of {_GROUP}", point.load)


@cache
def _entry_points() -> tuple[Any, ...]:
    from importlib.metadata import entry_points

    return tuple(entry_points(group=_GROUP))


def _import_from_here_too(name: str) -> None:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.import_module(name)


def _load(what: str, load: Callable[[], Any]) -> None:
    try:
        load()
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"{what}, which cannot be imported: {reason}") from error


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
            raise InputError(f"{field.name} must be of type {names}; got {field.name}={value!r}")
        if isinstance(value, float):
            check(math.isfinite(value), config, field.name, "finite")


def check(condition: bool, config: object, field: str, allowed: str) -> None:
    """Raise ValueError that names the field, its value and what is allowed."""
    if not condition:
        raise InputError(f"{field} must be {allowed}; got {field}={getattr(config, field)!r}")
