"""Checkpoints that load without this package: a model of any family, and the code of its routers.

The code is this package's own files, so there is one implementation. It needs torch and
transformers alone; fused kernels are left out, results are the same.
"""

import ast
import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import OlmoeForCausalLM

from l2r._version import __version__
from l2r.errors import InputError
from l2r.hf.checkpoints.pretrained import save_model
from l2r.hf.models import transformers_tables
from l2r.hf.models.olmoe import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.hf.models.opening import preparing_code
from l2r.hf.swap import swapped_classes
from l2r.hf.swap.class_registry import auto_models
from l2r.hf.swap.swapped_classes import HOME, stock_base
from l2r.kernels import dispatch, plain
from l2r.laboratory import PACKAGE
from l2r.routers import LinearRouter, Router, RouterConfig

CODE, ENTRY = "l2r_code", "modeling_l2r"  # folder, file
_HEADER = '''"""{name} with routers of l2r-moe {version} (Apache-2.0), in plain PyTorch.

Load: {auto}.from_pretrained(FOLDER, trust_remote_code=True)
The files beside this one are those of the package, with other import lines.
"""
'''
_INSTALLED = ("torch", "transformers", "numpy", "safetensors")  # needed by every exported folder
_ALLOWED = "from l2r ... import ..., the standard library, torch, transformers, numpy, safetensors"
_OURS = ("l2r", PACKAGE)
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
    "l2r.laboratory": """
PACKAGE = "l2r_lab"


def has_laboratory():
    \"\"\"In l2r-moe this looks for the laboratory; a folder has the routers that it needs.\"\"\"
    return False
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


def drop_model_code(config):
    \"\"\"In l2r-moe this removes the code of a stock model.\"\"\"


def config_with_code(base):
    \"\"\"In l2r-moe this notes that the package and the folder's code are needed.\"\"\"
    return base
""",
}


def export_remote_code(
    model: Any,
    out: str | Path,
    *,
    tokenizer: Any = None,
    sections: Sequence[str] = (),
    write: Callable[[Any, Path], None] | None = None,
    source: Path | None = None,
) -> Path:
    """Write a folder that plain transformers loads with ``trust_remote_code=True``.

    ``model`` is ours, or one whose routers were swapped, in all layers or in some; a stock OLMoE
    whose routers were all swapped alike becomes our own, which engines know.
    ``sections`` are those of the model's card that say how it was made and what was measured;
    ``write`` and ``source`` are those of ``save_model``. Raises ValueError for a
    model without a router of ours, for a class of the user's own, for a router's file that imports
    what the folder would lack and for a folder that is not empty.
    """
    model = as_l2r_olmoe(model)
    code, auto_map = remote_code(model)
    before = vars(model.config).get("auto_map")  # of an earlier export that it was opened from
    model.config.auto_map = {**preparing_code(before), **auto_map}
    try:
        save_model(
            model,
            Path(out),
            tokenizer=tokenizer,
            files=code,
            sections=sections,
            write=write,
            source=source,
        )
    finally:
        if before is None:
            del model.config.auto_map
        else:
            model.config.auto_map = before
    return Path(out)


def remote_code(model: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Files that build a model, by their names in its folder, and the ``auto_map`` of its config.

    Raises ValueError as ``export_remote_code``.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    config_class = type(model.config)
    classes = {auto.__name__: kind for auto, kind in auto_models(config_class)}
    if not routers or type(model) not in classes.values():
        raise InputError(
            "model must be of a family of transformers or ours, with routers of ours; got "
            f"{type(model).__name__} with {len(routers)} of them"
        )
    classes["AutoConfig"] = config_class
    # A configuration without arguments has the linear router: transformers asks what differs.
    kinds = {type(router).__module__ for router in routers} | {LinearRouter.__module__}
    lines, modules = _class_lines(set(classes.values()))
    # Routers register themselves when their file is imported.
    entry = [*(f"from .{file_stem(kind)} import __name__ as _" for kind in sorted(kinds)), *lines]
    used = next(name for name, kind in classes.items() if kind is type(model))
    files = source_files([*kinds, *modules])
    files[f"{ENTRY}.py"] = _HEADER.format(name=type(model).__name__, version=__version__, auto=used)
    files[f"{ENTRY}.py"] += "\n".join(entry) + "\n"
    auto_map = {name: f"{CODE}/{ENTRY}.{kind.__name__}" for name, kind in classes.items()}
    return {f"{CODE}/{name}": text for name, text in files.items()}, auto_map


def _class_lines(classes: set[Any]) -> tuple[list[str], list[str]]:
    """Lines of Python that import or make classes, and the modules of ours that they import."""
    imports, made, modules = [], [], set()
    changed = {}
    for kind in sorted(classes, key=lambda kind: kind.__name__):
        swapped = kind.__module__ == HOME
        base = stock_base(kind) if swapped else kind
        is_ours = _is_ours(base.__module__)
        module = f".{file_stem(base.__module__)}" if is_ours else base.__module__
        imports.append(f"from {module} import {base.__name__}")
        modules |= {base.__module__} if is_ours else set()
        if swapped:
            maker = "swapped_model" if hasattr(base, "config_class") else "swapped_config"
            made.append(f"{kind.__name__} = {maker}({base.__name__})")
            changed[_key(base)] = _key(kind)
        # save_pretrained copies the file of a class's module: all of the code.
        made.append(f"{kind.__name__}.__module__ = __name__")
    if changed:
        made.append(f"share_names({changed!r})")
        modules |= {swapped_classes.__name__, transformers_tables.__name__}
        imports.append(
            f"from .{file_stem(swapped_classes.__name__)} import swapped_config, swapped_model"
        )
        tables = file_stem(transformers_tables.__name__)
        imports.append(f"from .{tables} import share_names")
    return [*imports, "", *made], sorted(modules)


def _key(kind: Any) -> str:
    """Key of a class in transformers' table of conversions: a model type or a model's name."""
    return str(kind.__name__ if hasattr(kind, "config_class") else kind.model_type)


@torch.no_grad()
def as_l2r_olmoe(model: Any) -> Any:
    """Convert an OLMoE in memory whose routers were all swapped alike into one of ours.

    ``config.swapped_from`` says of which type a stock one was.
    The weights are copies, or none where they are on torch's meta device.
    """
    on_disk = "disk" in (getattr(model, "hf_device_map", None) or {}).values()
    if not isinstance(model, OlmoeForCausalLM) or on_disk:
        return model
    swaps = getattr(model.config, "l2r_swap", None) or []
    if len(swaps) != 1 or len(swaps[0]["layers"]) != model.config.num_hidden_layers:
        return model
    router = RouterConfig.from_dict(swaps[0]["router"])
    if swaps[0]["selection"] == "family":
        router = dataclasses.replace(router, normalize_weights=model.config.norm_topk_prob)
    values = model.config.to_dict()
    if "router" not in values:  # else it is one of ours already
        values["swapped_from"] = OlmoeForCausalLM.config_class.model_type
    for name in ("l2r_swap", "router", "model_type", "architectures"):
        values.pop(name, None)
    with torch.device(model.get_input_embeddings().weight.device):
        ours = L2rOlmoeForCausalLM(L2rOlmoeConfig(**values, router=router.to_dict()))
    ours.generation_config = model.generation_config
    weights, places = model.state_dict(), ours.state_dict(keep_vars=True)
    odd = sorted(weights.keys() ^ places.keys())
    if odd:
        raise InputError(f"the model's tensors must be those of an OLMoE; got {', '.join(odd[:3])}")
    for name, place in places.items():
        own = weights[name]
        place.data = place.data.to(own.dtype) if place.is_meta else own.clone()
    return ours.train(model.training)


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
    """Return a module's source with other import lines, and the modules that these name."""
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
        if not _can_be_kept(node, own=not _is_ours(module)) or not _fills(node, lines):
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
    """Say whether an import works in the folder, as it stands or from the files next to it.

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
    if roots & {*_OURS, "jaxtyping"}:
        return False
    return not own or roots <= {*_INSTALLED, *sys.stdlib_module_names}


def _is_in_a_file(package: str, name: str) -> bool:
    """Say whether ``from package import name`` gives a definition of a copied file: no module."""
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
    """Say whether nothing but a comment shares the lines of an import that is to be rewritten."""
    if isinstance(node, ast.Import) or not _is_copied(node.module):
        return True
    before = lines[node.lineno - 1].encode()[: node.col_offset]
    after = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset :].strip()
    return not before.strip() and (not after or after.startswith(b"#"))


def _origin(package: str, name: str) -> str:
    """Return the module that defines what ``from package import name`` gives."""
    if f"{package}.{name}" in _STAND_INS:
        return f"{package}.{name}"
    if package in _STAND_INS:
        return package
    defined = str(getattr(getattr(importlib.import_module(package), name), "__module__", package))
    return defined if _is_copied(defined) else package


def _is_copied(module: str | None) -> bool:
    return module is not None and (_is_ours(module) or module.split(".")[0] == "jaxtyping")


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in _OURS
