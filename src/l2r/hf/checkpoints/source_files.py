"""Files of this package that a model needs, as they stand, for a folder that brings its code.

Every module becomes a file of one folder, ``l2r.routers.base`` is routers_base.py; its import lines
from this package become lines from the files next to it. Stand-ins take the place of what the
model does without: fused kernels, cards, entries in tables, jaxtyping.
"""

import ast
import importlib
import inspect
import sys
from collections.abc import Sequence

from l2r.errors import InputError
from l2r.kernels import dispatch, plain

_INSTALLED = ("torch", "transformers", "numpy", "safetensors")  # needed by every exported folder
_ALLOWED = "from l2r ... import ..., the standard library, torch, transformers, numpy, safetensors"
_SHAPES = ("Bool", "Float", "Int", "Real", "Shaped")  # of jaxtyping

_STAND_INS = {
    "jaxtyping": """
class _Array:
    \"\"\"Float[Tensor, "T D"] says a shape to whoever reads it; nothing checks it here.\"\"\"

    def __class_getitem__(cls, item):
        return item[0]


Bool = Float = Int = Real = Shaped = _Array
""",
    "l2r.kernels.dispatch": """
import sys

from .kernels_plain import {plain}

dispatch = sys.modules[__name__]  # routers import it by this name
""",
    "l2r.routers.external_routers": """
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
    "l2r.hf.models.lossless": """
def check_save(model, **options):
    \"\"\"In l2r-moe this refuses a save that would lose weights.\"\"\"
""",
    "l2r.hf.models.opening": """
class NeedsPackage:
    \"\"\"In l2r-moe this notes in config.json that the package is needed.\"\"\"


def config_with_code(base):
    \"\"\"In l2r-moe this notes that the package and the folder's code are needed.\"\"\"
    return base
""",
}


def source_files(modules: Sequence[str]) -> dict[str, str]:
    """Files by name: those of ``modules`` and of every module of this package that they import.

    Raises ValueError for a module without a source file, such as one typed into a console, for the
    program that runs, for an import of what the folder would lack, and for two files of one name.
    """
    files: dict[str, str] = {}
    owners: dict[str, str] = {}
    pending = list(modules)
    while pending:
        module = pending.pop()
        name = f"{file_stem(module)}.py"
        if owners.setdefault(name, module) != module:
            both = " and ".join(sorted((owners[name], module)))
            raise InputError(f"{name} of the export would be two files, {both}; rename yours")
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
    if module == "__main__":
        raise InputError(
            "an export copies the file of a router, and this router's module is __main__, the "
            f"program that runs; move its class to a file of its own (allowed there: {_ALLOWED})"
        )
    try:
        source = inspect.getsource(importlib.import_module(module))
    except (OSError, TypeError) as error:
        raise InputError(f"an export copies the file of {module}, which has none") from error
    lines, imported = source.splitlines(), []
    tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in sorted(nodes, key=lambda node: -node.lineno):
        if not _can_be_kept(node, own=not module.startswith("l2r.")) or not _fills(node, lines):
            raise InputError(
                f"an export cannot copy {inspect.getsourcefile(importlib.import_module(module))}, "
                f"line {node.lineno}: {ast.unparse(node)}; allowed, on lines of their own: "
                f"{_ALLOWED}"
            )
        if isinstance(node, ast.Import) or not _is_copied(node.module):
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


def _can_be_kept(node: ast.Import | ast.ImportFrom, *, own: bool) -> bool:
    """Whether an import works in the folder, as it stands or from the files next to it.

    ``own``: the file is the user's; those of this package guard what may be missing.
    """
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        if node.level or node.module is None:
            return False
        if _is_copied(node.module):
            return all(_is_in_a_file(node.module, name) for name in names)
        names = [node.module]
    roots = {name.partition(".")[0] for name in names}
    if roots & {"l2r", "jaxtyping"}:
        return False
    return not own or roots <= {*_INSTALLED, *sys.stdlib_module_names}


def _is_in_a_file(package: str, name: str) -> bool:
    """Whether ``from package import name`` gives what a copied file defines: no module, no star."""
    if package == "jaxtyping":
        return name in _SHAPES
    if not hasattr(importlib.import_module(package), name):
        return False
    origin = _origin(package, name)
    if origin in _STAND_INS:
        return True
    contents = vars(importlib.import_module(origin))
    # A package with __getattr__ imports its names late, by names that its copy would not have.
    return "__getattr__" not in contents and not inspect.ismodule(contents.get(name))


def _fills(node: ast.Import | ast.ImportFrom, lines: Sequence[str]) -> bool:
    """Whether nothing but a comment shares the lines of an import that is to be rewritten."""
    if isinstance(node, ast.Import) or not _is_copied(node.module):
        return True
    before = lines[node.lineno - 1].encode()[: node.col_offset]
    after = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].strip()
    return not before.strip() and (not after or after.startswith(b"#"))


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
