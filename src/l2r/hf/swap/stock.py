"""The family behind a folder of ours: names of its classes, its configuration, its selection.

For engines that have the family and know nothing of our classes.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from l2r.errors import InputError
from l2r.hf.models.olmoe import L2rOlmoeForCausalLM
from l2r.hf.swap.class_registry import swapped_architecture
from l2r.hf.swap.families import FAMILIES, TABLE
from l2r.hf.swap.swapped_classes import HOME, class_name, stock_base
from l2r.routers.selection_rule import Selection
from l2r.transformers_hook import type_name


def stock_architectures() -> dict[str, str]:
    """Language models of ours by class name, each with transformers' class of the family.

    ``L2rMixtralForCausalLM`` to ``MixtralForCausalLM``; our own model to OLMoE's.
    """
    own = L2rOlmoeForCausalLM
    names = dict.fromkeys((own.__name__, class_name(own)), own.__name__.removeprefix("L2r"))
    for family in TABLE:
        stock = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family.model_type)
        if stock is not None:
            plain = type_name(family.model_type) == f"l2r_{family.model_type}"
            names[("L2r" if plain else "L2rSwapped") + stock] = stock
    return names


def our_architecture(values: Mapping[str, Any]) -> str:
    """Our name of a class in the values of a config.json; version 0.2 wrote the stock name.

    Raises ValueError where there is none.
    """
    name = (values.get("architectures") or [None])[0]
    if not isinstance(name, str):
        raise InputError(f"architectures in config.json must name a class; got {name!r}")
    return name if name.startswith("L2r") else str(swapped_architecture(name).__name__)


def as_stock_configuration(config: Any) -> Any:
    """Return a configuration of a swapped model, changed in place to the family's own class.

    Our fields stay on it. Another is as it was; that of our own model is its family's.
    """
    if type(config).__module__ == HOME:
        config.__class__ = stock_base(type(config))
        config.__dict__.pop("model_type", None)  # that of the class counts
    return config


def family_selection(config: Any) -> Selection:
    """Read the selection of a family from the router that transformers makes.

    Raises ValueError for a family that is in no table of ours.
    """
    family = next((entry for entry in TABLE if entry.model_type == config.model_type), None)
    if family is None:
        raise InputError(f"model_type must be that of a family of l2r; got {config.model_type!r}")
    if family.model_type not in FAMILIES:  # whose router this transformers has in another form
        return family.selection(config)
    stock = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type])
    kind = getattr(import_module(stock.__module__), family.router)
    with torch.device("meta"):
        return family.selection(kind(config))
