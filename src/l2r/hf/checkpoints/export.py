"""Checkpoints that load without this package: a model of any family, and the code of its routers.

The code is this package's own files, so there is one implementation. It needs torch and
transformers alone; fused kernels are left out, results are the same.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import OlmoeForCausalLM

from l2r._version import __version__
from l2r.errors import InputError
from l2r.hf.checkpoints.pretrained import save_model
from l2r.hf.checkpoints.source_files import file_stem, source_files
from l2r.hf.models import transformers_tables
from l2r.hf.models.olmoe import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.hf.swap import swapped_classes
from l2r.hf.swap.class_registry import auto_models
from l2r.hf.swap.swapped_classes import HOME, stock_base
from l2r.routers import LinearRouter, Router, RouterConfig

CODE, ENTRY = "l2r_code", "modeling_l2r"  # folder, file
_HEADER = '''"""{name} with routers of l2r-moe {version} (Apache-2.0), in plain PyTorch.

Load: {auto}.from_pretrained(FOLDER, trust_remote_code=True)
The files beside this one are those of the package, with other import lines.
"""
'''


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
    model.config.auto_map = auto_map
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
        is_ours = base.__module__.startswith("l2r.")
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
    """A stock OLMoE, no layer of it on disk, whose routers were all swapped alike, as one of ours.

    ``config.swapped_from`` says of which type it was.
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
    values = {**model.config.to_dict(), "swapped_from": OlmoeForCausalLM.config_class.model_type}
    for name in ("l2r_swap", "model_type", "architectures"):
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
