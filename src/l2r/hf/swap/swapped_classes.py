"""Configuration and model classes of swapped models: transformers' own under names of ours.

A separate model type (``l2r_mixtral``, ``L2rMixtralForCausalLM``) makes every loader that goes
by config.json build our routers, or stop: it cannot take the folder for a stock Mixtral.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import output_capturing

from l2r.errors import InputError
from l2r.hf.models.initialize import reset_missing
from l2r.hf.models.lossless import check_save
from l2r.hf.models.opening import NeedsPackage, config_with_code, drop_model_code
from l2r.hf.models.transformers_tables import share_conversion
from l2r.hf.models.vllm_backend import check_backend
from l2r.hf.swap.sites import INITIALIZED, replay_swaps
from l2r.routers import Router
from l2r.transformers_hook import type_name

HOME = "l2r.hf.swap.class_registry"  # where pickle and PEFT look the classes up by name
# Where transformers' own classes are, ours, and ours in the code of an exported folder.
_KNOWN = ("transformers.models.", "l2r.hf.models.", f"{__name__.rpartition('.')[0]}.hf_models_")
UNSAVED = "swapped in memory; save_pretrained it and load that folder"


def class_name(base: Any) -> str:
    """Name of the swapped class of a configuration or a model: ``L2rMixtralForCausalLM``."""
    model_type = getattr(base, "config_class", base).model_type
    prefix = "L2r" if type_name(model_type) == f"l2r_{model_type}" else "L2rSwapped"
    return prefix + base.__name__


def is_known(base: type) -> bool:
    """Say whether a class is of transformers or of this package, and no user's own."""
    return base.__module__.startswith(_KNOWN)


@cache
def swapped_config(base: Any) -> Any:
    """Return the configuration class of swapped models whose configuration was a ``base``."""

    def build(self, *args: object, **values: object) -> None:  # type: ignore[no-untyped-def]
        base.__init__(self, *args, **values)
        self.__dict__.pop("model_type", None)  # of the class

    body = {"__init__": build, "__module__": HOME, "model_type": type_name(base.model_type)}
    bases = (base,) if issubclass(base, NeedsPackage) else (NeedsPackage, base)
    share_conversion(type_name(base.model_type), base.model_type)
    return type(class_name(base), bases, body)


@cache
def swapped_model(base: Any) -> Any:
    """Return the model class of swapped models that were of class ``base``.

    A new model gets the routers of ``config.l2r_swap``. A class from a folder's code keeps its
    name, by which that code is saved again.
    """

    # vLLM asks isinstance(argument, annotation), one place off: ``self`` must have no annotation.
    def build(  # type: ignore[no-untyped-def]
        self, config: PreTrainedConfig, *args: object, **options: object
    ) -> None:
        swaps = getattr(config, "l2r_swap", None)
        if not swaps:
            raise InputError(f"config of {type(self).__name__} must have l2r_swap; got {swaps!r}")
        with _of_class(config, base.config_class) if is_known(base) else nullcontext():
            base.__init__(self, config, *args, **options)
        check_backend(self)
        paths = replay_swaps(self, swaps)
        strict = {*self._keep_in_fp32_modules_strict, *paths}
        self._keep_in_fp32_modules_strict = _present(self, strict)
        self._keep_in_fp32_modules = _present(self, self._keep_in_fp32_modules)
        _take_classes(self)

    @torch.no_grad()
    def initialize(self: Any, module: nn.Module) -> None:
        if isinstance(module, Router):
            reset_missing(module)
        else:
            with _without_routers(module):
                base._init_weights(self, module)

    @wraps(base.save_pretrained)
    def save(self: Any, save_directory: Any, *args: Any, **options: Any) -> None:
        check_save(self, **options)
        base.save_pretrained(self, save_directory, *args, **options)

    @wraps(base.push_to_hub)
    def push(self: Any, repo_id: str, *args: Any, **options: Any) -> Any:
        check_save(self)  # before the repository is made
        return base.push_to_hub(self, repo_id, *args, **options)

    body = {
        "__init__": build,
        "_init_weights": initialize,
        "save_pretrained": save,
        "push_to_hub": push,
    }
    if not is_known(base):
        body |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
        body["_auto_class"] = "AutoModelForCausalLM"
        return _recording(type(base.__name__, (base,), body))
    body |= {
        "__module__": HOME,
        "config_class": swapped_config(base.config_class),
        # These read the source of the class's module and ask whether it is transformers' own.
        "_can_set_attn_implementation": classmethod(
            lambda cls: base._can_set_attn_implementation()
        ),
        "_can_set_experts_implementation": classmethod(
            lambda cls: base._can_set_experts_implementation()
        ),
        "is_custom_code": classmethod(lambda cls: False),
    }
    share_conversion(class_name(base), base.__name__)
    return _recording(type(class_name(base), (base,), body))


@contextmanager
def _of_class(config: Any, base: type) -> Iterator[None]:
    """Give a configuration its stock class, without code, as long as the stock model is built.

    Some build their inner model by AutoModel, which takes the configuration's class and code.
    """
    own, auto_map = type(config), config.__dict__.pop("auto_map", None)
    config.__class__ = base
    try:
        yield
    finally:
        config.__class__ = own
        if auto_map is not None:
            config.auto_map = auto_map


def _present(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Names of modules or tensors that a model has: not those of the routers that are gone."""
    tensors = [f".{name}." for name in model.state_dict()]
    return {name for name in names if any(re.search(rf"\.{name}\.", path) for path in tensors)}


class _Scratch(nn.Module):
    """Stands for a router while its block is initialized: a number for any name."""

    def __getattr__(self, name: str) -> Any:
        return torch.empty(1)


@contextmanager
def _without_routers(block: nn.Module) -> Iterator[None]:
    """Let a family initialize a block whose router it knows by the names of its tensors."""
    routers = {name: part for name, part in block._modules.items() if isinstance(part, Router)}
    block._modules.update({name: _Scratch() for name in routers})
    try:
        yield
    finally:
        block._modules.update(routers)


def _recording(swapped: Any) -> Any:
    """Return a class of swapped models, of which transformers records what it does of its base."""
    dict.__setitem__(
        output_capturing._CAN_RECORD_REGISTRY, str(swapped), swapped._can_record_outputs
    )
    return swapped


def mark(model: nn.Module) -> None:
    """Change a model with replaced routers, and its configuration, to the classes of swapped ones.

    A class that the user wrote is not changed; the configuration then names the routers, and one
    with code in its folder says that it needs this package too.
    """
    config: Any = model.config
    if not isinstance(config, PreTrainedConfig):
        return
    mark_config(config)
    changed = _take_classes(model)
    config.architectures = changed[:1] or config.architectures
    _rename(model)


def mark_config(config: Any) -> None:
    """Change the class of a configuration, transformers' or ours, to that of swapped models."""
    base: Any = type(config)
    if is_known(base):
        config.__class__ = CONFIG_MAPPING[type_name(base.model_type)]
        config.__dict__.pop("model_type", None)
        drop_model_code(config)
    elif getattr(config, "auto_map", None) and base.__module__ != HOME:
        config.__class__ = config_with_code(base)


def stock_base(swapped: type) -> Any:
    """Class from which a class of swapped models or configurations was made."""
    return next(base for base in swapped.__bases__ if base is not NeedsPackage)


def unmark(model: nn.Module) -> None:
    """Restore the classes that ``mark`` changed."""
    config: Any = model.config
    for part in [config, *model.modules()]:
        if type(part).__module__ == HOME:
            part.__class__ = stock_base(type(part))
    _rename(model)


def _rename(model: nn.Module) -> None:
    """Replace the name of the loaded folder: TRL and PEFT would open that, not this model."""
    for part in [model.config, *model.modules()]:
        if isinstance(part, PreTrainedConfig | PreTrainedModel) and part.name_or_path:
            part.name_or_path = UNSAVED


def _take_classes(model: nn.Module) -> list[str]:
    """Change the classes of the Hugging Face models in a model that hold routers of ours.

    The text model of a wrapper among them: it initializes what a checkpoint lacks. Returns the
    names of those that share the configuration, from the outside to the inside.
    """
    names = []
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        base: Any = type(module)
        shares = module.config is model.config
        if not shares and not any(isinstance(part, Router) for part in module.modules()):
            continue
        if is_known(base):
            module.__class__ = swapped_model(base)
            _leave_blocks_to_it(module)
        if shares:
            names.append(type(module).__name__)
    return names


def _leave_blocks_to_it(model: nn.Module) -> None:
    """Have a swapped class initialize the blocks of its routers: no class of the user's could."""
    for block in model.modules():
        for part in block.children():
            if isinstance(part, Router) and hasattr(block, INITIALIZED):
                setattr(block, INITIALIZED, getattr(part, INITIALIZED, False))
