"""Quantized checkpoints: what config.json says of them, and how to get whole weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

QUANTIZATION = "quantization_config"
# Configurations of transformers that unpack while a folder is loaded.
_UNPACK = {
    "mxfp4": "Mxfp4Config",
    "fp8": "FineGrainedFP8Config",
    "compressed-tensors": "CompressedTensorsConfig",
}
_AS_LOADED = ("bitsandbytes", "torchao")  # saved right under the names that they have in memory


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """Return the quantization method that a config.json names for the model or a part of it."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        found = part.get(QUANTIZATION)
        if found:
            values = found if isinstance(found, dict) else {}
            bits = {"load_in_4bit", "load_in_8bit"} & values.keys()
            return str(values.get("quant_method") or ("bitsandbytes" if bits else "unknown method"))
    return None


def packed_method(model: Any, *, save_original_format: bool = True) -> str | None:
    """Return the method of packed weights that ``save_pretrained`` does not write.

    transformers has no way back to the names and shards that it read. What it quantized itself, and
    what two methods have in memory, it writes right.
    """
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None or not getattr(quantizer, "pre_quantized", False):
        return None
    method = quantizer.quantization_config.quant_method
    method = str(getattr(method, "value", method))
    return None if method in _AS_LOADED and not save_original_format else method


def remedy(method: str, name: str | Path) -> str:
    """Say how to get a folder that can be swapped from the quantized one ``name``."""
    load = f"AutoModelForCausalLM.from_pretrained({str(name)!r}"
    if method in _UNPACK:
        load += f", {QUANTIZATION}={_UNPACK[method]}(dequantize=True))"
    elif method == "bitsandbytes":
        load += ").dequantize(torch.bfloat16)"
    else:
        return "take the checkpoint that it was quantized from"
    return f"write a copy with whole weights and take that: {load}.save_pretrained(COPY)"


def saved_in_memory(method: str) -> bool:
    """Say whether ``save_original_format=False`` writes packed weights right."""
    return method in _AS_LOADED


def quantization_values(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fields of the quantization_config that ``quantization_method`` names; none without one."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        if part.get(QUANTIZATION):
            found = part[QUANTIZATION]
            return found if isinstance(found, dict) else {}
    return {}
