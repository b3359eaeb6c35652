"""The recipes in this package: settings times routers, a table of them per folder.

``demo/_base.yaml`` holds two YAML documents. The first are settings, a base like any other
(``base: demo/_base``). The second has under ``recipes`` what each recipe of the folder changes,
put over the settings and the router of its name in ``_routers.yaml``, or over its own ``base``
alone. A file ``small/_cpu.yaml`` makes recipes ``small/cpu-...``.

Besides the changes there is a header: ``about``, ``command``, ``hardware`` and ``expected``, given
for the whole table or for one recipe, with {name}, {title} and {number} filled in.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from l2r.training.recipes.changes import merge

_HEADER = {"about": "", "command": "Command: ", "hardware": "Hardware: ", "expected": "Expected: "}
_FILLED_IN = ("title", "number")  # number: the metric that the paper has, or that was seen


@dataclass(frozen=True)
class Packaged:
    """values: changes, and in ``base`` the recipe or settings under them. header: for readers.

    router: its name in ``_routers.yaml``, such as ``l2r_sips``; None for an ablation of one.
    """

    values: dict[str, Any]
    header: str
    router: str | None


def settings(name: str) -> dict[str, Any] | None:
    """Settings in the file of a name such as ``demo/_base``, or None where there is no such file.

    A name never leaves the package.
    """
    folder, _, stem = name.rpartition("/")
    paths = [path for path in _files() if (path.parent.name, path.stem) == (folder, stem)]
    return _documents(paths[0])[0] if paths else None


@cache
def packaged_recipes() -> dict[str, Packaged]:
    """Every recipe by name, e.g. ``demo/l2r-sips``."""
    routers = _documents(_root() / "_routers.yaml")[0]
    recipes = {}
    for path in _files():
        folder, part = path.parent.name, path.stem.removeprefix("_")
        prefix = f"{folder}/" if part == "base" else f"{folder}/{part}-"
        for table in _documents(path)[1:]:
            entries = table.pop("recipes")
            for key, changes in entries.items():
                entry, name = changes or {}, prefix + key
                shared = {} if "base" in entry else routers.get(key, {})
                router = key.replace("-", "_") if key in routers else None
                base = f"{folder}/{path.stem}"
                recipes[name] = _recipe(name, base, [table, shared, entry], router)
    return dict(sorted(recipes.items(), key=lambda item: item[0].split("/")))


def _recipe(name: str, base: str, parts: list[Mapping[str, Any]], router: str | None) -> Packaged:
    """Later parts over earlier ones; the keys of the header apart from the recipe's fields."""
    header: dict[str, Any] = {"name": name}
    values: dict[str, Any] = {"base": base}
    for part in parts:
        header |= {key: part[key] for key in part if key in (*_HEADER, *_FILLED_IN)}
        values = merge(values, {key: part[key] for key in part if key not in header})
    lines = [word + header[key].format(**header).strip() for key, word in _HEADER.items()]
    return Packaged(values, "\n".join(lines), router)


def _root() -> Path:
    return Path(str(files("l2r.training.recipes")))


def _files() -> list[Path]:
    return sorted(_root().glob("*/_*.yaml"))


def _documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
