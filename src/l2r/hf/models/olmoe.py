"""OLMoE with any of our routers, as a Hugging Face model.

Everything but the router is transformers' own OLMoE: attention, experts (grouped_mm), cache,
generation. Defaults are OLMoE-1B-7B's as the paper trains it: expert width 1024 (transformers'
own default of 2048 is another model) and a vocabulary of 50280.
"""

from typing import Any, ClassVar, no_type_check

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GenerationMixin,
    OlmoeConfig,
    OlmoeForCausalLM,
    OlmoeModel,
)
from transformers.models.olmoe.modeling_olmoe import (
    OlmoeAttention,
    OlmoeDecoderLayer,
    OlmoeExperts,
    OlmoePreTrainedModel,
)
from transformers.utils.output_capturing import OutputRecorder

from l2r.hf.models.auto_entries import add_to_auto_classes
from l2r.hf.models.card import SavesCard
from l2r.hf.models.initialize import attach_router, reset_missing, tell_initialized
from l2r.hf.models.opening import NeedsPackage
from l2r.hf.models.transformers_tables import share_adapters, share_conversion, share_names
from l2r.routers import Router, RouterConfig
from l2r.routers.base import truncated_normal

DEFAULT_ROUTER = "linear"  # an exported file has its own: it holds that one router alone


@no_type_check  # transformers passes fields that its own signature does not have
class L2rOlmoeConfig(NeedsPackage, OlmoeConfig):
    """OlmoeConfig plus ``router``: a RouterConfig, or its dictionary form with ``kind``.

    ``L2rOlmoeConfig(router={"kind": "l2r_sips", "rank": 2, "heads": 16})``. It is stored as a
    dictionary with every field, so that a saved configuration is complete.
    Raises ValueError for an unknown router or option.
    """

    model_type = "l2r_olmoe"

    vocab_size: int = 50280
    intermediate_size: int = 1024
    router: RouterConfig | dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # A stock OLMoE configuration carries its own type, which would hide our key mapping.
        self.model_type = type(self).model_type
        self.complete()

    def complete(self) -> RouterConfig:
        """Check ``router``, store its dictionary form in full and return the object."""
        router = self.router or {"kind": DEFAULT_ROUTER}
        if not isinstance(router, RouterConfig):
            router = RouterConfig.from_dict(router)
        self.router = router.to_dict()
        return router


class _RouterWeights(SavesCard):
    """Initialization that both nested classes need: OLMoE's, and the routers' own."""

    config_class = L2rOlmoeConfig
    # transformers looks for a decorator in the source of this very file; the experts are its own.
    _can_set_experts_implementation_cached_value = True
    _keep_in_fp32_modules_strict = ("mlp.gate",)  # "gate" would mean gate_up_proj too
    _can_record_outputs: ClassVar = {
        "router_logits": OutputRecorder(Router, index=0),
        "hidden_states": OlmoeDecoderLayer,
        "attentions": OlmoeAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range  # type: ignore[attr-defined]
        if isinstance(module, Router):
            reset_missing(module)
        elif isinstance(module, OlmoeExperts):
            truncated_normal(module.gate_up_proj, std)
            truncated_normal(module.down_proj, std)
        elif isinstance(module, nn.Linear):
            truncated_normal(module.weight, std)
        else:
            OlmoePreTrainedModel._init_weights(self, module)
        tell_initialized(module)


class L2rOlmoeModel(_RouterWeights, OlmoeModel):
    """OlmoeModel whose routers are built from ``config.router``."""

    def __init__(self, config: L2rOlmoeConfig) -> None:
        super().__init__(config)
        # from_pretrained(..., router=...) sets the field after the config's own check.
        router_config = config.complete()
        for index, layer in enumerate(self.layers):
            layer.mlp.gate = attach_router(
                router_config,
                stream=index,
                hidden_size=config.hidden_size,
                num_experts=config.num_experts,
                top_k=config.num_experts_per_tok,
            )
        self.post_init()  # again, for the routers: they draw what they draw inside a whole model


class L2rOlmoeForCausalLM(_RouterWeights, OlmoeForCausalLM, GenerationMixin):
    """OLMoE language model with a selectable router; works with every Auto class."""

    def __init__(self, config: L2rOlmoeConfig) -> None:
        OlmoePreTrainedModel.__init__(self, config)
        self.model = L2rOlmoeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts = config.num_experts
        self.num_experts_per_tok = config.num_experts_per_tok
        self.post_init()


share_names(
    {
        "olmoe": "l2r_olmoe",
        "OlmoeModel": "L2rOlmoeModel",
        "OlmoeForCausalLM": "L2rOlmoeForCausalLM",
    }
)
share_conversion("l2r_olmoe", "olmoe")
share_adapters("l2r_olmoe", "olmoe")
add_to_auto_classes(
    L2rOlmoeConfig, {AutoModel: L2rOlmoeModel, AutoModelForCausalLM: L2rOlmoeForCausalLM}
)
