"""OLMoE and ViT with routers of ours, on transformers; their sizes, cards and weight files.

Imports moe/ and below. Begin at olmoe.py, whose class the Auto classes know once it is imported.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.hf.models.card import auto_class as auto_class
    from l2r.hf.models.experts_backend import computing_experts as computing_experts
    from l2r.hf.models.experts_backend import register_experts as register_experts
    from l2r.hf.models.initialize import attach_router as attach_router
    from l2r.hf.models.initialize import watch_initialized as watch_initialized
    from l2r.hf.models.layouts import check_unpacked as check_unpacked
    from l2r.hf.models.layouts import layout_of as layout_of
    from l2r.hf.models.layouts import packing as packing
    from l2r.hf.models.layouts import whole_matrix as whole_matrix
    from l2r.hf.models.lossless import check_parts as check_parts
    from l2r.hf.models.lossless import check_whole as check_whole
    from l2r.hf.models.lossless import check_whole_weights as check_whole_weights
    from l2r.hf.models.lossless import note_losses as note_losses
    from l2r.hf.models.lossless import save_refusal as save_refusal
    from l2r.hf.models.olmoe import L2rOlmoeConfig as L2rOlmoeConfig
    from l2r.hf.models.olmoe import L2rOlmoeForCausalLM as L2rOlmoeForCausalLM
    from l2r.hf.models.olmoe import L2rOlmoeModel as L2rOlmoeModel
    from l2r.hf.models.opening import names_model_code as names_model_code
    from l2r.hf.models.opening import preparing_code as preparing_code
    from l2r.hf.models.router_dtypes import routers_keep_dtype as routers_keep_dtype
    from l2r.hf.models.size import ModelSize as ModelSize
    from l2r.hf.models.size import forward_flops as forward_flops
    from l2r.hf.models.size import model_size as model_size
    from l2r.hf.models.size import vit_s_costs as vit_s_costs
    from l2r.hf.models.stock_models import one_layer as one_layer
    from l2r.hf.models.stock_models import stock_olmoe as stock_olmoe
    from l2r.hf.models.stock_models import stock_trainer as stock_trainer
    from l2r.hf.models.version_names import CACHE as CACHE
    from l2r.hf.models.version_names import (
        checkpoint_activations as checkpoint_activations,
    )
    from l2r.hf.models.vit import L2rViTConfig as L2rViTConfig
    from l2r.hf.models.vit import L2rViTForImageClassification as L2rViTForImageClassification
    from l2r.hf.models.vit import L2rViTModel as L2rViTModel
    from l2r.hf.models.weight_files import check_finite as check_finite
    from l2r.hf.models.weight_files import files_of_weights as files_of_weights
    from l2r.hf.models.weight_files import read_config as read_config
    from l2r.hf.models.whole_sequences import reading_whole_sequences as reading_whole_sequences
else:
    __getattr__, __dir__ = lazy_names(__name__, "lm")
