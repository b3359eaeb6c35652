"""ViT with a mixture of experts in chosen blocks, as a Hugging Face model.

Everything but the MoE blocks is transformers' own ViT. Defaults are the paper's ViT-S/16:
12 blocks, 384 wide, 6 heads, 224 px, the MLPs of the last 4 blocks replaced by 16 GELU experts
of which each token uses 2.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)
from transformers.models.vit.modeling_vit import ViTAttention, ViTLayer, ViTPreTrainedModel
from transformers.utils.output_capturing import OutputRecorder

from l2r.errors import InputError
from l2r.hf.models.auto_entries import add_to_auto_classes
from l2r.hf.models.card import SavesCard
from l2r.hf.models.initialize import attach_router, reset_missing, tell_initialized
from l2r.hf.models.opening import NeedsPackage
from l2r.hf.models.transformers_tables import share_adapters, share_names, share_preparation
from l2r.hf.models.weight_files import read_weights
from l2r.moe import Experts, MoELayer
from l2r.routers import Router, RouterConfig
from l2r.routers.base import truncated_normal
from l2r.routers.defaults import vision_router


class L2rViTConfig(NeedsPackage, ViTConfig):
    """ViTConfig plus the MoE fields; ``router`` is a RouterConfig or its dictionary form.

    num_experts, num_experts_per_tok: N and k. moe_layers: blocks that get experts, None for the
    last 4, [] for a dense ViT. moe_intermediate_size: width of an expert, None for the MLP's.
    NOTE: the paper does not give the width; we take the MLP's own, 4 * 384, as V-MoE does.

    Raises ValueError for an unknown router or option and for blocks that do not exist.
    """

    model_type = "l2r_vit"
    # transformers' __init__ takes names that are no fields (num_labels); jaxtyping's check of
    # dataclasses knows fields only.
    __no_type_check__: ClassVar[bool] = True

    hidden_size: int = 384
    num_attention_heads: int = 6
    intermediate_size: int = 1536
    layer_norm_eps: float = 1e-6
    num_experts: int = 16
    num_experts_per_tok: int = 2
    moe_layers: list[int] | None = None
    moe_intermediate_size: int | None = None
    router: RouterConfig | dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        # A stock ViT configuration carries its own type, which would hide ours.
        self.model_type = type(self).model_type
        self.complete()

    def complete(self) -> RouterConfig:
        """Check the MoE fields, write the defaults out in full, return the router's config."""
        depth = self.num_hidden_layers
        blocks = range(max(0, depth - 4), depth) if self.moe_layers is None else self.moe_layers
        self.moe_layers = sorted(set(blocks))
        if not all(0 <= block < depth for block in self.moe_layers):
            raise InputError(
                f"moe_layers must lie between 0 and {depth - 1}; got moe_layers={list(blocks)}"
            )
        if self.moe_layers and self.hidden_act != "gelu":
            raise InputError(f"hidden_act must be 'gelu' with experts; got {self.hidden_act!r}")
        self.moe_intermediate_size = self.moe_intermediate_size or self.intermediate_size
        router = self.router or {"kind": "l2r_sips"}
        if not isinstance(router, RouterConfig):
            router = vision_router(router)
        self.router = router.to_dict()
        return router


class _MoEWeights(SavesCard):
    """Initialization that both nested classes need: ViT's, the experts' and the routers'."""

    config_class = L2rViTConfig
    _keep_in_fp32_modules_strict = ("mlp.router",)
    _can_record_outputs: ClassVar = {
        "router_logits": OutputRecorder(Router, index=0),
        "hidden_states": ViTLayer,
        "attentions": ViTAttention,
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Router):
            reset_missing(module)
        elif isinstance(module, Experts):
            truncated_normal(module.up_proj, module.init_std)
            truncated_normal(module.down_proj, module.init_std)
            for bias in (module.up_bias, module.down_bias):
                if bias is not None:
                    nn.init.zeros_(bias)
        else:
            ViTPreTrainedModel._init_weights(self, module)
        tell_initialized(module)


class L2rViTModel(_MoEWeights, ViTModel):
    """ViTModel whose blocks in ``config.moe_layers`` hold an MoELayer instead of the MLP."""

    def __init__(
        self, config: L2rViTConfig, add_pooling_layer: bool = True, use_mask_token: bool = False
    ) -> None:
        super().__init__(config, add_pooling_layer, use_mask_token)
        # from_pretrained(..., router=...) sets fields after the config's own check.
        router_config = config.complete()
        for index in config.moe_layers or []:
            router = attach_router(
                router_config,
                stream=index,
                hidden_size=config.hidden_size,
                num_experts=config.num_experts,
                top_k=config.num_experts_per_tok,
            )
            experts = Experts(
                config.num_experts,
                config.hidden_size,
                config.moe_intermediate_size or config.intermediate_size,
                activation="gelu",
                bias=True,
                init_std=config.initializer_range,
            )
            self.layers[index].mlp = MoELayer(router, experts)
        self.post_init()


class L2rViTForImageClassification(_MoEWeights, ViTForImageClassification):
    """Image classifier on the class token; works with every Auto class."""

    def __init__(self, config: L2rViTConfig) -> None:
        ViTPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.vit = L2rViTModel(config, add_pooling_layer=False)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @classmethod
    @torch.no_grad()
    def from_dense(
        cls,
        dense: ViTForImageClassification | str | Path,
        config: L2rViTConfig | None = None,
    ) -> "L2rViTForImageClassification":
        """Sparse upcycling: dense ViT weights, every expert a copy of the MLP it replaces.

        ``dense`` is a model or the path of one; ``config`` must have its sizes (default: its
        sizes with our MoE defaults). Routers are fresh. The classifier is fresh too where the
        number of classes differs or the folder has none. The result computes what the dense model
        does if the router has ``normalize_weights``; otherwise the MoE blocks' outputs shrink by
        the sum of the k weights, which the paper leaves as they are.

        Raises ValueError if a size, the heads or the activation differ, or the weights in a folder
        are not whole.
        """
        if not isinstance(dense, nn.Module):
            dense = read_weights(
                ViTForImageClassification, Path(dense), optional=("classifier.", "pooler.")
            )
        if config is None:
            theirs: ViTConfig = dense.config
            config = L2rViTConfig(**theirs.to_dict())
        for field in ("num_hidden_layers", "num_attention_heads", "hidden_act"):
            there, here = getattr(dense.config, field), getattr(config, field)
            if there != here:  # their weights may have the same shapes
                raise InputError(
                    f"dense model and config must have the same {field}; "
                    f"{field} is {there!r} there and {here!r} here"
                )
        model = cls(config)
        target = model.state_dict()
        source = {name: value.to(torch.float32) for name, value in dense.state_dict().items()}
        if source["classifier.weight"].shape != target["classifier.weight"].shape:
            del source["classifier.weight"], source["classifier.bias"]
        for index in config.moe_layers or []:
            block = f"vit.layers.{index}.mlp."
            for old, new in _EXPERT_NAMES.items():
                copied = source.pop(block + old)
                source[f"{block}experts.{new}"] = copied.expand(config.num_experts, *copied.shape)
        for name, value in source.items():
            if name not in target or target[name].shape != value.shape:
                ours = tuple(target[name].shape) if name in target else "nothing"
                raise InputError(
                    f"dense model and config must have the same sizes; {name} is "
                    f"{tuple(value.shape)} there and {ours} here"
                )
            target[name].copy_(value)
        return model


_EXPERT_NAMES = {
    "fc1.weight": "up_proj",
    "fc1.bias": "up_bias",
    "fc2.weight": "down_proj",
    "fc2.bias": "down_bias",
}

share_names(
    {
        "vit": "l2r_vit",
        "ViTModel": "L2rViTModel",
        "ViTForImageClassification": "L2rViTForImageClassification",
    }
)
share_adapters("l2r_vit", "vit")
share_preparation(L2rViTConfig, ViTConfig)
add_to_auto_classes(
    L2rViTConfig,
    {AutoModel: L2rViTModel, AutoModelForImageClassification: L2rViTForImageClassification},
)
