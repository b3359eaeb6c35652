"""Classes of swapped models by name, and their places in transformers' tables.

``l2r.hf.swap.class_registry.L2rMixtralForCausalLM`` is made when it is asked for, also by pickle.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import transformers
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from l2r.errors import InputError
from l2r.hf.models.olmoe import L2rOlmoeConfig, L2rOlmoeForCausalLM, L2rOlmoeModel
from l2r.hf.models.transformers_tables import share_adapters, share_names, share_preparation
from l2r.hf.models.vit import L2rViTConfig, L2rViTForImageClassification, L2rViTModel
from l2r.hf.swap.swapped_classes import class_name, swapped_config, swapped_model
from l2r.transformers_hook import PREFIX, SWAPPED, type_name

_OWN: dict[str, Any] = {kind.model_type: kind for kind in (L2rOlmoeConfig, L2rViTConfig)}
_OWN_CLASSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        L2rOlmoeConfig, L2rOlmoeModel, L2rOlmoeForCausalLM,
        L2rViTConfig, L2rViTModel, L2rViTForImageClassification,
    )
}  # fmt: skip


@cache
def config_class(model_type: str) -> Any:
    """Return the configuration class of a model type of ours, registered with all its models.

    Raises KeyError for a name that is not that of a model type of ours.
    """
    if model_type in _OWN:
        return _OWN[model_type]
    name = model_type.removeprefix(PREFIX).removeprefix(SWAPPED)
    base = CONFIG_MAPPING[name]
    if type_name(name) != model_type or base.model_type != name:
        raise KeyError(model_type)
    config = swapped_config(base)
    AutoConfig.register(model_type, config, exist_ok=True)
    names = {name: model_type}
    for auto, stock in auto_models(base):
        model = swapped_model(stock)
        auto.register(config, model, exist_ok=True)
        names[stock.__name__] = model.__name__
    share_names(names)
    share_preparation(config, base)
    share_adapters(model_type, name)
    return config


def swapped_architecture(name: str) -> Any:
    """Return the class of a name in config.json, ``MixtralForCausalLM`` (0.2) or with our prefix.

    Raises ValueError for a name that no class has.
    """
    base = _stock_class(name)
    swapped = __getattr__(class_name(base)) if hasattr(base, "config_class") else _by_name(name)
    if swapped is None:
        raise InputError(f"architectures must name a class of transformers; got {name!r}")
    return swapped


def __getattr__(name: str) -> Any:
    swapped = _by_name(name)
    if swapped is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return swapped


def _by_name(name: str) -> Any:
    for prefix in ("L2rSwapped", "L2r"):
        base: Any = _stock_class(name.removeprefix(prefix)) if name.startswith(prefix) else None
        config: Any = getattr(base, "config_class", base)
        if not hasattr(config, "model_type") or class_name(base) != name:
            continue
        made = config_class(type_name(config.model_type))
        return made if base is config else swapped_model(base)
    return None


def _stock_class(name: str) -> Any:
    """Return the class of transformers or of ours with a name; None where there is none."""
    return _OWN_CLASSES.get(name) or getattr(transformers, name, None)


def auto_models(base: Any) -> Iterator[tuple[Any, Any]]:
    """Auto classes that map a configuration class, each with its model class."""
    for auto in vars(modeling_auto).values():
        is_auto = isinstance(auto, type) and issubclass(auto, _BaseAutoModelClass)
        mapping = auto._model_mapping if is_auto else None
        stock = None if mapping is None else mapping.get(base, None)
        # Some make a part of a model from the configuration of the whole: the swap is not in it.
        if getattr(stock, "config_class", None) is base:
            yield auto, stock
