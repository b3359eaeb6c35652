"""Assumptions of vLLM's Transformers backend that some families break.

It gives every layer's attention the heads of the configuration, and computes all experts by a
kernel of its own. A model that is otherwise runs there too: its answers are wrong, and nothing says
so. transformers, and vLLM's own class of the family, compute it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from l2r.errors import InputError

_LARGE = 100.0  # of a gate: families clamp at 7 to 50
_TOLERANCE = 1e-5  # of the largest value: one rounding of float32 in another order


def check_backend(model: nn.Module) -> None:
    """Raise InputError for a model that vLLM's Transformers backend would compute otherwise.

    Outside of that backend nothing is asked: the configuration's attention is vLLM's in it alone.
    """
    text: Any = getattr(model.config, "get_text_config", lambda: model.config)()
    if not str(getattr(text, "_attn_implementation", "")).startswith("vllm"):
        return
    for path, module in model.named_modules():
        for theirs, own in (*_heads(module, text), *_experts(path, module)):
            raise InputError(
                f"vLLM's Transformers backend {theirs}; {path} of {type(model).__name__} {own}. "
                "Its answers would be wrong there: use l2r serve or transformers"
            )


def _heads(module: nn.Module, text: Any) -> Iterator[tuple[str, str]]:
    """Heads that the backend gives a layer of the text model, and its own."""
    layer, keys = getattr(module, "layer_idx", None), getattr(module, "k_proj", None)
    if not isinstance(layer, int) or not isinstance(keys, nn.Linear):
        return
    config: Any = getattr(module, "config", None)
    if config is not text:  # of what sees or hears
        return
    if getattr(config, "is_heterogeneous", False):  # the backend then asks each layer's own
        config = config.per_layer_config[layer]
    size = getattr(module, "head_dim", None)
    found = {"num_key_value_heads": size and keys.out_features // size}
    if isinstance(out := getattr(module, "o_proj", None), nn.Linear):
        values = getattr(module, "v_head_dim", size)
        found["num_attention_heads"] = values and out.in_features // values
    for name, heads in found.items():
        wanted = getattr(config, name, None)
        if heads and wanted and heads != wanted:
            yield f"gives each layer {name}={wanted}", f"has {heads}"


def _experts(path: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Say what the backend computes in stacked experts, and what these do instead."""
    weights = list(module.parameters(recurse=False))
    if path.rpartition(".")[2] != "experts" or not weights or any(w.ndim != 3 for w in weights):
        return  # of another form, which it leaves to the model or finds out itself
    if len({len(weight) for weight in weights}) > 1:
        yield "needs weights for each expert", "chooses experts without weights too"
    if not _is_swiglu(module):
        yield "computes silu(gate) * up in experts", "computes otherwise"


@torch.no_grad()
def _is_swiglu(experts: Any) -> bool:
    """Ask experts for a gated value, over a range that is wider than where some families clamp."""
    gate = torch.linspace(-_LARGE, _LARGE, 64, device="cpu", dtype=torch.float32)
    up = gate.flip(0).roll(7)
    wanted = functional.silu(gate) * up
    try:
        found: Tensor = experts._apply_gate(torch.cat([gate, up])[None])[0]
    except AttributeError:  # no gate of the usual form: the activation alone
        found = experts.act_fn(gate) * up
    return bool((found - wanted).abs().max() <= _TOLERANCE * wanted.abs().max())
