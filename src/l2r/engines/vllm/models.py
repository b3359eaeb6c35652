"""vLLM's classes with our routers, by name: ``models.L2rMixtralForCausalLM`` is made when asked."""

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

from torch import Tensor

from l2r.engines.vllm.architectures import vllm_name
from l2r.engines.vllm.gates import Gates
from l2r.hf.swap import stock_architectures


def __getattr__(name: str) -> Any:
    if name not in stock_architectures():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return served_class(name)


@cache
def served_class(name: str) -> Any:
    """vLLM's own class of a family, whose MoE layers get logits from our routers."""
    from vllm import ModelRegistry

    base = ModelRegistry.models[vllm_name(name)].load_model_cls()

    def build(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        gates = Gates(vllm_config.model_config.hf_config, vllm_name(name))
        with gates.in_new_layers():
            base.__init__(self, vllm_config=vllm_config, prefix=prefix)
        gates.place(self)
        # A trainer's sampler may begin without a checkpoint.
        gates.loads_in_parts = vllm_config.load_config.load_format == "dummy"
        self.l2r_gates = gates

    def load_weights(self: Any, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        return self.l2r_gates.load(self, weights, partial(base.load_weights, self))

    # vLLM calls these by keyword and asks for the parameters of ``__init__``.
    made = type(name, (base,), {"__init__": build, "load_weights": load_weights})
    made.__module__ = __name__
    return made
