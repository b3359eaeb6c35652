"""Places of a model type of ours in the tables of transformers and PEFT: the family's."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto import configuration_auto, modeling_auto

from l2r.imports import after_import

_PREPARING = {  # files of transformers.models.auto, and the beginning of their tables' names
    "tokenization_auto": "TOKENIZER",
    "image_processing_auto": "IMAGE_PROCESSOR",
    "video_processing_auto": "VIDEO_PROCESSOR",
    "feature_extraction_auto": "FEATURE_EXTRACTOR",
    "processing_auto": "PROCESSOR",
}
_WRONG_TOKENIZERS = "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS"


def share_names(pairs: Mapping[str, str]) -> None:
    """Put a model type and classes of ours into the lists of class names that have the family's.

    ``pairs`` are our names by the family's. By these lists Trainer decides whether smoothed labels
    are those of the next tokens, and pipelines, lm_eval and serving what a model can do.
    """
    for name, table in vars(modeling_auto).items():
        for theirs in pairs.keys() & table.keys() if name.endswith("_MAPPING_NAMES") else ():
            if isinstance(table[theirs], str) and table[theirs] in pairs:
                table[pairs[theirs]] = pairs[table[theirs]]


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
    """Return the same, but for a norm inside a router: some families rename every ``norm``."""
    match = transform.compiled_sources.search(_NORM)
    if match is None or match.start() < _NORM.index(".norm"):
        return transform
    sources = [_IN_ROUTER + source for source in transform._original_source_patterns]
    targets = transform._original_target_patterns
    if hasattr(transform, "copy"):
        return transform.copy(sources, targets)
    changed = type(transform)(sources, targets)  # as ``copy`` does in transformers 5.24
    changed.scope_prefix = transform.scope_prefix
    changed.base_model_prefix = transform.base_model_prefix
    return changed


def share_preparation(made: Any, base: Any) -> None:
    """Prepare text, images, video and sound as the family does; by configuration classes."""
    # The classes are looked for in the family's file of transformers.
    module = configuration_auto.model_type_to_module_name(base.model_type)
    configuration_auto.SPECIAL_MODEL_TYPE_TO_MODULE_NAME[made.model_type] = module
    for file, kind in _PREPARING.items():
        after_import(f"transformers.models.auto.{file}", partial(_prepare, made, base, kind))


def _prepare(made: Any, base: Any, kind: str, module: Any) -> None:
    ours, theirs = made.model_type, base.model_type
    names = getattr(module, f"{kind}_MAPPING_NAMES")
    if theirs in names:
        names[ours] = names[theirs]
        getattr(module, f"{kind}_MAPPING")._reverse_config_mapping[made.__name__] = ours
    wrong: set[str] = getattr(module, _WRONG_TOKENIZERS, set())
    if theirs in wrong:
        wrong.add(ours)


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
