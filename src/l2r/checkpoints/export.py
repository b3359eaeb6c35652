"""Checkpoints that load without this package: our OLMoE with its code in one file beside it.

The file is put together from this package's own sources, so there is one implementation. It
needs torch and transformers alone; fused kernels are left out, results are the same.
"""

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import OlmoeForCausalLM

from l2r.checkpoints.pretrained import save_model
from l2r.models import card, olmoe, opening
from l2r.models.olmoe import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.routers import RouterConfig
from l2r.routers.registry import router_class

MODULE = "modeling_l2r_olmoe"
AUTO_MAP = {
    "AutoConfig": f"{MODULE}.L2rOlmoeConfig",
    "AutoModel": f"{MODULE}.L2rOlmoeModel",
    "AutoModelForCausalLM": f"{MODULE}.L2rOlmoeForCausalLM",
}
_KERNELS, _PLAIN = "l2r.kernels.dispatch", "l2r.kernels.plain"
_HEADER = '''"""OLMoE with an L2R router, complete in one file.

Load: AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)
Put together by l2r-moe {version} (Apache-2.0) from its own sources; router: {kind}.
"""

from __future__ import annotations

'''


def export_remote_code(
    model: Any, out: str | Path, *, tokenizer: Any = None, sections: Sequence[str] = ()
) -> Path:
    """Write a folder that plain transformers loads with ``trust_remote_code=True``.

    ``sections`` are those of the model's card that say how it was made and what was measured.
    ``model`` is ours, or a stock OLMoE whose routers were all swapped alike.
    Raises ValueError for other models and for a folder that is not empty.
    """
    model = as_l2r_olmoe(model)
    model.config.auto_map = dict(AUTO_MAP)
    try:
        source = modeling_source(model.config.router["kind"])
        files = {f"{MODULE}.py": source}
        save_model(model, Path(out), tokenizer=tokenizer, files=files, sections=sections)
    finally:
        del model.config.auto_map
    return Path(out)


@torch.no_grad()
def as_l2r_olmoe(model: Any) -> L2rOlmoeForCausalLM:
    """The model itself where it is ours, or a swapped stock OLMoE as one of ours.

    Raises ValueError where the routers are not all ours and alike.
    """
    swaps = getattr(model.config, "l2r_swap", None) or []
    if isinstance(model, L2rOlmoeForCausalLM) and not swaps:
        return model
    alike = len(swaps) == 1 and len(swaps[0]["layers"]) == model.config.num_hidden_layers
    if not isinstance(model, OlmoeForCausalLM) or not alike:
        raise ValueError(
            "remote code is for OLMoE with one kind of router in every layer; "
            f"got {type(model).__name__} with {len(swaps)} swaps"
        )
    router = RouterConfig.from_dict(swaps[0]["router"])
    if swaps[0]["selection"] == "family":
        router = dataclasses.replace(router, normalize_weights=model.config.norm_topk_prob)
    values = model.config.to_dict()
    for name in ("l2r_swap", "model_type", "architectures"):
        values.pop(name, None)
    ours = L2rOlmoeForCausalLM(L2rOlmoeConfig(**values, router=router.to_dict()))
    ours.generation_config = model.generation_config
    weights, places = model.state_dict(), ours.state_dict(keep_vars=True)
    odd = sorted(weights.keys() ^ places.keys())
    if odd:
        raise ValueError(f"the model's tensors must be those of an OLMoE; got {', '.join(odd[:3])}")
    for name, place in places.items():
        place.data = weights[name].clone()
    return ours.train(model.training)


def modeling_source(kind: str) -> str:
    """Text of the modeling file for a router, by its registered name."""
    modules: dict[str, ModuleType] = {}
    for root in (router_class(kind).__module__, olmoe.__name__):
        _collect(root, modules)
    imports: dict[str, None] = {}
    parts, owners = [], dict[str, str]()
    for name, module in modules.items():
        tree = ast.parse(inspect.getsource(module))
        imports.update(dict.fromkeys(_foreign_imports(tree)))
        for defined in _top_level_names(tree):
            assert owners.setdefault(defined, name) == name, (defined, name, owners[defined])
        body = _body(module, tree)
        if module is olmoe:
            line = 'DEFAULT_ROUTER = "{}"'
            body = body.replace(line.format(olmoe.DEFAULT_ROUTER), line.format(kind))
            body = body.replace(f"({card.SavesCard.__name__})", "").replace("NeedsPackage, ", "")
        parts.append(body)
        if name == _PLAIN:
            parts.append(_dispatch_class(module))
    from l2r import __version__

    header = _HEADER.format(version=__version__, kind=kind)
    return header + "\n".join(imports) + "\n\n\n" + "\n\n\n".join(parts) + "\n"


def _collect(name: str, modules: dict[str, ModuleType]) -> None:
    """Add a module after the modules of this package that it imports."""
    # the file has the model, not its card, and needs no package
    if name in (*modules, card.__name__, opening.__name__):
        return
    module = importlib.import_module(name)
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ImportFrom) and _is_ours(node.module):
            for alias in node.names:
                _collect(_origin(str(node.module), alias.name), modules)
    modules[name] = module


def _origin(package: str, name: str) -> str:
    """Module that defines what ``from package import name`` gives; plain code for kernels."""
    if f"{package}.{name}" == _KERNELS:
        return _PLAIN
    member = getattr(importlib.import_module(package), name)
    defined = str(getattr(member, "__module__", package))
    return defined if _is_ours(defined) else package


def _is_ours(name: str | None) -> bool:
    return name is not None and name.split(".")[0] == "l2r"


def _foreign_imports(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        source = getattr(node, "module", None)
        if not _is_ours(source) and source != "jaxtyping":  # annotations are not evaluated
            yield ast.unparse(node)


def _body(module: ModuleType, tree: ast.Module) -> str:
    """Source of a module without docstring, imports, type-checking blocks and Auto*.register."""
    lines = inspect.getsource(module).splitlines()
    dropped: set[int] = set()
    for node in ast.walk(tree):
        inner = isinstance(node, ast.ImportFrom) and _is_ours(node.module)
        if inner or (node in tree.body and _is_preamble(node)):
            dropped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))  # type: ignore[attr-defined]
    return "\n".join(line for n, line in enumerate(lines, 1) if n not in dropped).strip()


def _is_preamble(node: ast.AST) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING"
    if not isinstance(node, ast.Expr):
        return False
    # auto_map does what Auto*.register does here, and a process that has this package keeps its own
    return isinstance(node.value, ast.Constant) or ast.unparse(node.value).startswith("Auto")


def _top_level_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _dispatch_class(plain: ModuleType) -> str:
    """What routers call as ``dispatch.name``: here always the plain function."""
    chosen = vars(importlib.import_module(_KERNELS))
    names = [name for name, value in vars(plain).items() if name in chosen and callable(value)]
    lines = "\n".join(f"    {name} = staticmethod({name})" for name in names if name[0].islower())
    head = 'class dispatch:\n    """Plain code; l2r-moe has fused kernels."""'
    return f"{head}\n\n{lines}"
