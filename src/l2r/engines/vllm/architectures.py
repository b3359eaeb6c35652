"""Architectures of ours that vLLM serves, and how it reads their config.json.

A folder names ``L2rMixtralForCausalLM`` and the model type ``l2r_mixtral``. vLLM looks a class up
by the first and decides by the second, about DeepSeek's latent attention for one, so it gets our
class and the family's configuration.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from l2r.errors import InputError
from l2r.hf.models import preparing_code
from l2r.hf.swap import as_stock_configuration, our_architecture, stock_architectures
from l2r.transformers_hook import PREFIX, stock_type

MODELS = f"{__name__.rpartition('.')[0]}.models"  # whose attributes are the classes, by name
# Where vLLM spells a class of transformers otherwise.
_SPELLED = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}
# Classes of vLLM 0.32 that choose other experts than transformers from equal logits.
_OTHERWISE = ("LagunaForCausalLM",)
# Families that neither a class of vLLM 0.32 nor its Transformers backend serves: why.
_NEITHER = {
    "DeepseekV4ForCausalLM": "reads another config.json than that of transformers for",
    "LongcatFlashForCausalLM": "has no place for a router that chooses experts without weights in",
}


def _mimo_v2_flash(config: Any) -> dict[str, Any]:
    ropes = config.rope_parameters
    full, sliding = ropes["full_attention"], ropes["sliding_attention"]
    for name in ("partial_rotary_factor", "rope_type"):
        if full.get(name) != sliding.get(name):
            raise InputError(f"rope_parameters must have one {name} in vLLM's class; got {ropes}")
    return {
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in config.layer_types],
        "moe_layer_freq": [int(kind == "sparse") for kind in config.mlp_layer_types],
        "swa_num_attention_heads": config.num_attention_heads,
        "swa_num_key_value_heads": 2 * config.num_key_value_heads,
        "swa_head_dim": config.head_dim,
        "swa_v_head_dim": config.v_head_dim,
        "sliding_window_size": config.sliding_window,
        "add_swa_attention_sink_bias": True,
        "rope_theta": full["rope_theta"],
        "swa_rope_theta": sliding["rope_theta"],
        "partial_rotary_factor": full.get("partial_rotary_factor", 0.334),
        "layernorm_epsilon": config.rms_norm_eps,
    }


def _hy_v3(config: Any) -> dict[str, Any]:
    kinds = list(config.mlp_layer_types)
    if kinds != sorted(kinds):  # "dense" before "sparse"
        raise InputError(f"mlp_layer_types must begin with the dense in vLLM's class; got {kinds}")
    return {
        "expert_hidden_dim": config.moe_intermediate_size,
        "first_k_dense_replace": kinds.count("dense"),
        "qk_norm": True,
        "route_norm": True,
    }


def _constant(**values: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda config: values


_noaux = _constant(topk_method="noaux_tc", scoring_func="sigmoid")
_IMPLIED: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "afmoe": _constant(score_func="sigmoid", route_norm=True, n_group=1, topk_group=1),
    "deepseek_v3": _noaux,
    "deepseek_v32": _noaux,
    "glm4_moe_lite": _noaux,
    "hy_v3": _hy_v3,
    "mimo_v2_flash": _mimo_v2_flash,
    "minimax_m2": _constant(scoring_func="sigmoid", use_routing_bias=True),
}


def implied(config: Any) -> dict[str, Any]:
    """Fields that vLLM reads and that follow from a configuration of transformers, by its family.

    Transformers' class has them as constants or under other names, and a file that it wrote has
    them not: without them vLLM's stock class computes otherwise, or stops.
    """
    return _IMPLIED.get(config.model_type, _constant())(config)


def vllm_name(architecture: str) -> str:
    """vLLM's name of the stock class behind one of ours."""
    stock = stock_architectures().get(architecture, architecture)
    return _SPELLED.get(stock, stock)


def add_architectures(registry: Any) -> None:
    """Register those of our architectures whose family vLLM has."""
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    for name in stock_architectures():
        stock = vllm_name(name)
        if stock in (*_OTHERWISE, *_NEITHER) or not _is_native(registry.models.get(stock)):
            continue
        if name not in registry.models:  # vLLM warns of a second time
            # A string: vLLM imports classes when it needs them, in a process of its own.
            registry.register_model(name, f"{MODELS}:{name}")
        if stock in MODELS_CONFIG_MAP:  # settings that vLLM changes for a family, by class name
            MODELS_CONFIG_MAP[name] = MODELS_CONFIG_MAP[stock]


def _is_native(registered: Any) -> bool:
    """Tell a class of vLLM's own from its Transformers backend, by what is registered."""
    module = getattr(registered, "module_name", "")
    return registered is not None and not module.endswith(".transformers")


def read_our_configurations() -> None:
    """Have vLLM read config.json of our folders by ``served_config``, without their code."""
    from vllm.transformers_utils import config as configs

    parsers = configs._CONFIG_FORMAT_TO_CONFIG_PARSER
    usual = parsers["hf"]
    if getattr(usual, "reads_l2r", False):
        return

    class Parser(usual):  # type: ignore[misc, valid-type]
        reads_l2r = True

        def parse(self, model: Any, trust_remote_code: bool, *args: Any, **options: Any) -> Any:
            hub = {name: options.get(name) for name in ("revision", "code_revision")}
            values, _ = PreTrainedConfig.get_config_dict(model, **hub)
            ours = str(values.get("model_type", "")).startswith(PREFIX)
            if ours and has_class(model, values, trust_remote_code=trust_remote_code):
                return values, served_config(AutoConfig.from_pretrained(model, **hub), values)
            return super().parse(model, trust_remote_code, *args, **options)

    parsers["hf"] = Parser  # ``register_config_parser`` would print a warning


def has_class(model: str | Path, values: Mapping[str, Any], *, trust_remote_code: bool) -> bool:
    """Ask whether vLLM has a class for a folder of ours; False leaves it to the folder's code.

    Raises ValueError, one line, where transformers has not the family, and where vLLM has no class
    and the folder no code that may be run.
    """
    import vllm

    name = our_architecture(values)
    if name in vllm.ModelRegistry.models:
        return True
    family = stock_type(str(values["model_type"]))
    if family not in CONFIG_MAPPING:
        raise InputError(f"transformers {transformers.__version__} has no {family}; {model} is one")
    if why := _NEITHER.get(vllm_name(name)):
        raise InputError(f"vLLM {vllm.__version__} {why} {name[3:]}: use l2r serve {model}")
    if trust_remote_code and _brings_code(values):
        return False
    if name not in stock_architectures():
        raise InputError(f"the plug-in serves causal language models; {model} is a {name[3:]}")
    how = "run the folder's code in vLLM's Transformers backend with --trust-remote-code"
    if not _brings_code(values):
        how = f"l2r export {model} --out NEW; vllm serve NEW --trust-remote-code"
    lack = "has no class of its own for"
    if vllm_name(name) in _OTHERWISE:
        lack = "chooses other experts in its own class of"
    raise InputError(f"vLLM {vllm.__version__} {lack} {name[3:]}: {how}")


def _brings_code(values: Mapping[str, Any]) -> bool:
    """Say whether config.json names a model's code in the folder, as that of an export does."""
    names = values.get("auto_map") or {}
    models = names.keys() - preparing_code(names).keys()
    return any("--" not in str(names[name]) for name in models)


def served_config(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a configuration of ours, with the values of its file, in the class that vLLM knows.

    The names of an exported folder's code stay on it, for the Transformers backend.
    """
    config = as_stock_configuration(config)
    config.architectures = [our_architecture(values)]
    for name, value in implied(config).items():
        setattr(config, name, value)
    return config
