"""Places of a model type of ours in the tables of transformers and PEFT: the family's."""

from typing import Any

from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from l2r.imports import after_import


def share_conversion(ours: str, theirs: str) -> None:
    """Read and write experts as the family does; by model type, or by the name of a class.

    Without it a checkpoint's experts have other names than the model's, and are drawn at random.
    """
    keys = get_checkpoint_conversion_mapping(theirs)
    if keys is not None:
        kept = [_sparing_routers(transform) for transform in keys]
        register_checkpoint_conversion_mapping(ours, kept, overwrite=True)


# What stands before a name inside a router, its dot included or not: lookbehinds have fixed widths.
_IN_ROUTER = "".join(rf"(?<!\.{name})(?<!\.{name}\.)" for name in ("gate", "router"))
_NORM = ".gate.norm.weight"


def _sparing_routers(transform: Any) -> Any:
    """The same, but for a norm inside a router: some families rename every ``norm``."""
    match = transform.compiled_sources.search(_NORM)
    if match is None or match.start() < _NORM.index(".norm"):
        return transform
    sources = [_IN_ROUTER + source for source in transform._original_source_patterns]
    return transform.copy(sources, transform._original_target_patterns)


def share_adapters(ours: str, theirs: str) -> None:
    """Let PEFT adapt by default, and inside the experts, what it adapts in the family."""

    def patterns(module: Any) -> None:
        table = module._MODEL_TO_CONVERSION_PATTERN
        # A family that others are converted like stands in the values alone.
        pattern = table.get(theirs, theirs if theirs in table.values() else None)
        if pattern is not None:
            table[ours] = pattern

    def targets(module: Any) -> None:
        for name, table in vars(module).items():
            if name.startswith("TRANSFORMERS_MODELS_TO_") and theirs in table:
                table[ours] = table[theirs]

    after_import("peft.utils.transformers_weight_conversion", patterns)
    after_import("peft.utils.constants", targets)
