"""MoE architectures of the installed transformers, by its sources, and what we do with each.

No table of ours decides what counts: an architecture is a folder of ``transformers/models`` whose
modeling file has a class of experts, or whose configuration has a field that counts them.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from l2r.hf.swap.families import FAMILY_OF_ROUTER, REFUSED

SUPPORTED, RECOGNIZED, REFUSAL, NEW = "supported", "recognized", "refused", "not looked at"
MODELS = Path(transformers.__file__).parent / "models"
# Routers of supported architectures that stay as they are.
APART = {
    "Dots3NoteVisionTopKRouter": "of the vision tower",
    "Qwen3OmniMoeTalkerTextTopKRouter": "of the talker",
    "Qwen3OmniMoeTextTopKRouter": "in no model",
}
_EXPERTS = re.compile(r"Experts?(?![a-z])|M[oO][eE](?![a-z])")
_COUNT = re.compile(r"^    \w*experts\w*\s*:", re.MULTILINE)
_ROUTER = re.compile(r"(Router|Gate|Gating)\w*$")
_RETURNS_EXPERTS = re.compile(r"top_?k|num_experts|n_routed_experts", re.IGNORECASE)


@dataclass(frozen=True)
class Architecture:
    """A folder of transformers' models. families: ours, where it is supported. why: a refusal's
    reason, what its routers were recognized as, or the routers that nobody looked at."""

    name: str
    state: str
    families: tuple[str, ...] = ()
    why: str = ""


def architectures(models: Path = MODELS) -> list[Architecture]:
    """Every MoE architecture in a folder of models, by name."""
    folders = sorted(path for path in models.iterdir() if path.is_dir())
    return [_state(folder) for folder in folders if has_experts(folder)]


def has_experts(folder: Path) -> bool:
    """Whether an architecture has experts, by the names in its sources."""
    classes = [node.name for node in _classes(folder)]
    configuration = folder / f"configuration_{folder.name}.py"
    counts = configuration.is_file() and _COUNT.search(configuration.read_text(encoding="utf-8"))
    return bool(counts) or any(_EXPERTS.search(name) for name in classes)


def _state(folder: Path) -> Architecture:
    types = model_types(folder)
    reasons = [REFUSED[name] for name in (folder.name, *types) if name in REFUSED]
    if reasons:
        return Architecture(folder.name, REFUSAL, why=reasons[0])
    routers = _routers(folder) or [
        r for other in _elsewhere(folder, types) for r in _routers(other)
    ]
    families = {FAMILY_OF_ROUTER[r].model_type for r in routers if r in FAMILY_OF_ROUTER}
    unknown = [r for r in routers if r not in FAMILY_OF_ROUTER and r not in APART]
    if unknown or not families:
        return Architecture(folder.name, NEW, why=", ".join(unknown) or "no router class")
    return Architecture(folder.name, SUPPORTED, tuple(sorted(families)))


def _routers(folder: Path) -> list[str]:
    """Names of classes that choose experts."""
    return [
        node.name
        for node in _classes(folder)
        if _ROUTER.search(node.name) and _RETURNS_EXPERTS.search(ast.unparse(node))
    ]


def _elsewhere(folder: Path, types: list[str]) -> Iterator[Path]:
    """Folders whose models transformers takes for a configuration without any of its own."""
    for model in {MODEL_MAPPING_NAMES[name] for name in types if name in MODEL_MAPPING_NAMES}:
        module = getattr(transformers, model if isinstance(model, str) else model[0]).__module__
        yield folder.parent / module.split(".")[-2]


def model_types(folder: Path) -> list[str]:
    """Model types of the configurations of an architecture."""
    configuration = folder / f"configuration_{folder.name}.py"
    if not configuration.is_file():
        return []
    return re.findall(
        r'^    model_type = "([^"]+)"', configuration.read_text("utf-8"), re.MULTILINE
    )


def _classes(folder: Path) -> list[ast.ClassDef]:
    modeling = folder / f"modeling_{folder.name}.py"
    if not modeling.is_file():
        return []
    nodes = ast.parse(modeling.read_text(encoding="utf-8")).body
    return [node for node in nodes if isinstance(node, ast.ClassDef)]
