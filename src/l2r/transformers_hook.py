"""Model types of ours in transformers' Auto classes, whichever of the two is imported first.

``import l2r`` imports nothing of transformers. It adds one lookup, by which the classes are made
when a folder of ours is opened, and lets Trainer load checkpoints of MoE models whole and evaluate
them in half precision without rounding their routers.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from l2r.imports import after_import

PREFIX, SWAPPED = "l2r_", "swapped_"
_OWN = ("l2r_olmoe", "l2r_vit")
_REGISTRY = "l2r.hf.swap.class_registry"
_RESUME = "l2r.hf.checkpoints.resume"
_DTYPES = "l2r.hf.models.router_dtypes"
_OPENING = "l2r.hf.models.opening"


def type_name(model_type: str) -> str:
    """Model type of a swapped model: ``l2r_mixtral`` from ``mixtral``.

    ``l2r_swapped_olmoe`` from ``olmoe``, since the other name is our own model's.
    """
    ours = PREFIX + model_type
    return PREFIX + SWAPPED + model_type if ours in _OWN else ours


def stock_type(model_type: str) -> str:
    """Model type from which ``type_name`` made one: ``mixtral`` from ``l2r_mixtral``.

    Every other is its own.
    """
    if model_type in _OWN or not model_type.startswith(PREFIX):
        return model_type
    return model_type.removeprefix(PREFIX).removeprefix(SWAPPED)


def register() -> None:
    """Add our model types to the Auto classes and what Trainer needs, now or when imported."""
    after_import("transformers.models.auto.configuration_auto", _extend)
    after_import("transformers.trainer", _load_whole)
    after_import("transformers.trainer", _keep_dtypes)
    after_import("transformers.modeling_utils", _watch_opening)
    after_import("peft.auto", _allow)


def _extend(module: Any) -> None:
    mapping = module.CONFIG_MAPPING
    if not isinstance(mapping._extra_content, _Types):
        mapping._extra_content = _Types(mapping._extra_content, mapping._mapping.__contains__)


def _watch_opening(module: Any) -> None:
    """Refuse a configuration object that builds other routers than a folder of ours holds.

    transformers then does not read the folder's config.json, and draws what is missing. A model
    that opens keeps where it was, for the losses of a save.
    """
    usual = module.PreTrainedModel.from_pretrained.__func__

    @wraps(usual)
    def from_pretrained(
        cls: Any,
        pretrained_model_name_or_path: Any,
        *args: Any,
        config: Any = None,
        **options: Any,
    ) -> Any:
        path = pretrained_model_name_or_path
        if path is None:
            return usual(cls, path, *args, config=config, **options)
        opening = import_module(_OPENING)
        if config is not None and options.get("state_dict") is None:
            opening.check_given_config(path, config, options)
        source = opening.source_of(path, options)
        opened = usual(cls, path, *args, config=config, **options)
        opening.note_source(opened, source)
        return opened

    checked: Any = from_pretrained
    module.PreTrainedModel.from_pretrained = classmethod(checked)


def _load_whole(module: Any) -> None:
    """Resume, and load the best model at the end, by ``load_whole`` where it knows the model.

    Trainer leaves experts as they are whose checkpoint names them one by one.
    """
    trainer: Any = module.Trainer
    resume, load_best = trainer._load_from_checkpoint, trainer._load_best_model

    @wraps(resume)
    def load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        if not import_module(_RESUME).load_whole(self, resume_from_checkpoint):
            resume(self, resume_from_checkpoint, model)

    @wraps(load_best)
    def load_best_model(self: Any) -> None:
        if not import_module(_RESUME).load_whole(self, self.state.best_model_checkpoint):
            load_best(self)

    trainer._load_from_checkpoint, trainer._load_best_model = load_from_checkpoint, load_best_model


def _keep_dtypes(module: Any) -> None:
    """Evaluate in half precision with routers in the dtype that they have."""
    trainer: Any = module.Trainer
    evaluate = trainer.evaluation_loop

    @wraps(evaluate)
    def evaluation_loop(self: Any, *args: Any, **options: Any) -> Any:
        if not (self.args.bf16_full_eval or self.args.fp16_full_eval):
            return evaluate(self, *args, **options)
        with import_module(_DTYPES).routers_keep_dtype(self.model):
            return evaluate(self, *args, **options)

    trainer.evaluation_loop = evaluation_loop


def _allow(module: Any) -> None:
    """Let AutoPeftModel make classes of this package, which the user has imported."""
    usual = module.get_default_import_allowlist
    module.get_default_import_allowlist = lambda: [*usual(), "l2r"]


class _Types(dict[str, Any]):
    """Configuration classes by registered model type; ours are made on first use.

    ``is_stock`` says of a model type whether transformers has it.
    """

    def __init__(self, registered: dict[str, Any], is_stock: Callable[[str], bool]) -> None:
        super().__init__(registered)
        self._is_stock = is_stock

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (isinstance(key, str) and self._is_ours(key))

    def __missing__(self, key: str) -> Any:
        if not self._is_ours(key):
            raise KeyError(key)
        return import_module(_REGISTRY).config_class(key)

    def _is_ours(self, key: str) -> bool:
        if not key.startswith(PREFIX):
            return False
        name = key.removeprefix(PREFIX)
        return self._is_stock(name.removeprefix(SWAPPED)) or self._is_ours(name)
