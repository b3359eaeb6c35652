"""Files of this package that a model needs, as they stand, for a folder that brings its code.

Every module becomes a file of one folder, ``l2r.routers.base`` is routers_base.py; its import lines
from this package become lines from the files next to it. Stand-ins take the place of what the
model does without: fused kernels, cards, entries in tables, jaxtyping.
"""

import ast
import importlib
import inspect
from collections.abc import Sequence

from l2r.kernels import dispatch, plain

_STAND_INS = {
    "jaxtyping": """
class _Array:
    \"\"\"Float[Tensor, "T D"] says a shape to whoever reads it; nothing checks it here.\"\"\"

    def __class_getitem__(cls, item):
        return item[0]


Bool = Float = Int = Shaped = _Array
""",
    "l2r.kernels.dispatch": """
import sys

from .kernels_plain import {plain}

dispatch = sys.modules[__name__]  # routers import it by this name
""",
    "l2r.routers.own": """
def import_named_modules():
    \"\"\"In l2r-moe this imports the user's routers; a folder has those that it needs.\"\"\"


import_entry_points = import_named_modules
""",
    "l2r.hf.models.auto_entries": """
def add_to_auto_classes(config, models):
    \"\"\"In l2r-moe this registers the model; from a folder transformers does it.\"\"\"
""",
    "l2r.hf.models.card": """
class SavesCard:
    \"\"\"In l2r-moe this writes a model card.\"\"\"
""",
    "l2r.hf.models.opening": """
class NeedsPackage:
    \"\"\"In l2r-moe this notes in config.json that the package is needed.\"\"\"
""",
}


def source_files(modules: Sequence[str]) -> dict[str, str]:
    """Files by name: those of ``modules`` and of every module of this package that they import.

    Raises ValueError for a module without a source file, such as one typed into a console.
    """
    files: dict[str, str] = {}
    pending = list(modules)
    while pending:
        module = pending.pop()
        name = f"{file_stem(module)}.py"
        if name not in files:
            files[name], imported = _rewritten(module)
            pending += imported
    return files


def file_stem(module: str) -> str:
    """Name of a module's file, without its ending."""
    return module.removeprefix("l2r.").replace(".", "_")


def _rewritten(module: str) -> tuple[str, list[str]]:
    """A module's source with other import lines, and the modules that these name."""
    if module in _STAND_INS:
        names = [n for n, value in vars(plain).items() if n in vars(dispatch) and callable(value)]
        source = _STAND_INS[module].replace("{plain}", ", ".join(sorted(names)))
        title = f'"""Stand-in for {module}."""\n'
        return title + source, ["l2r.kernels.plain"] if "kernels_plain" in source else []
    try:
        source = inspect.getsource(importlib.import_module(module))
    except (OSError, TypeError) as error:
        raise ValueError(f"an export copies the file of {module}, which has none") from error
    lines, imported = source.splitlines(), []
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    for node in sorted(nodes, key=lambda node: -node.lineno):
        if not _is_copied(node.module):
            continue
        changed = []
        for alias in node.names:
            origin = _origin(str(node.module), alias.name)
            imported.append(origin)
            suffix = f" as {alias.asname}" if alias.asname else ""
            changed.append(f"from .{file_stem(origin)} import {alias.name}{suffix}")
        indent = " " * node.col_offset
        lines[node.lineno - 1 : node.end_lineno] = [indent + line for line in changed]
    return "\n".join(lines) + "\n", imported


def _origin(package: str, name: str) -> str:
    """Module that defines what ``from package import name`` gives."""
    if f"{package}.{name}" in _STAND_INS:
        return f"{package}.{name}"
    if package in _STAND_INS:
        return package
    defined = str(getattr(getattr(importlib.import_module(package), name), "__module__", package))
    return defined if _is_copied(defined) else package


def _is_copied(module: str | None) -> bool:
    return module is not None and module.split(".")[0] in ("l2r", "jaxtyping")
