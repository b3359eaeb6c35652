"""What vLLM's Transformers backend takes for granted of attention, and some families have not.

It gives every layer the heads of the configuration. A layer with others runs there too, and its
keys are read as those of other tokens: the answers are wrong, and nothing says so.
"""

from typing import Any

from torch import nn

from l2r.errors import InputError


def check_even_heads(model: nn.Module) -> None:
    """Raise InputError for a layer with other heads than its configuration, in vLLM's backend.

    In it alone: the configuration's attention is vLLM's there. transformers and vLLM's own
    classes compute such a model rightly.
    """
    whole: Any = getattr(model.config, "get_text_config", lambda: model.config)()
    if not str(getattr(whole, "_attn_implementation", "")).startswith("vllm"):
        return
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        keys, out = getattr(module, "k_proj", None), getattr(module, "o_proj", None)
        if not isinstance(layer, int) or not isinstance(keys, nn.Linear):
            continue
        if getattr(module, "config", None) is not whole:  # of what sees or hears
            continue
        mixed = getattr(whole, "is_heterogeneous", False)  # vLLM then asks each layer's own
        config = whole.per_layer_config[layer] if mixed else whole
        size = getattr(module, "head_dim", None)
        values = getattr(module, "v_head_dim", size)
        found = {"num_key_value_heads": size and keys.out_features // size}
        if isinstance(out, nn.Linear):
            found["num_attention_heads"] = values and out.in_features // values
        for name, heads in found.items():
            wanted = getattr(config, name, None)
            if heads and wanted and heads != wanted:
                raise InputError(
                    f"vLLM's Transformers backend gives each layer {name}={wanted}; layer {layer} "
                    f"of {type(model).__name__} has {heads}: its answers would be wrong. "
                    "l2r serve and transformers compute it"
                )
