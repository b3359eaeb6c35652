"""Transformers' own test classes around stock models and ours; pytest collects this file.

``tests`` is the folder of transformers' source distribution, put on the path by ``__main__``.
The testers below give their mixins what every model gives them: a tiny configuration and inputs.
"""

import inspect
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from tests import test_expert_parallel_mixin as ep
from tests import test_tensor_parallel_mixin as tp
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_modeling_common import (
    ModelTesterMixin,
    floats_tensor,
    ids_tensor,
    random_attention_mask,
)
from tests.test_training_mixin import TrainingTesterMixin
from transformers import (
    OlmoeConfig,
    OlmoeForCausalLM,
    OlmoeModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)
from transformers import conversion_mapping as conversions
from transformers.models.auto import modeling_auto as auto
from transformers.models.olmoe import modeling_olmoe

from l2r.hf.models import (
    L2rOlmoeConfig,
    L2rOlmoeForCausalLM,
    L2rViTConfig,
    L2rViTForImageClassification,
)
from l2r.hf.models.olmoe import L2rOlmoeModel
from l2r.hf.models.vit import L2rViTModel

# The tests read from these lists what a class computes, for instance whether it takes labels.
auto.MODEL_MAPPING_NAMES |= {"l2r_olmoe": "L2rOlmoeModel", "l2r_vit": "L2rViTModel"}
auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["l2r_olmoe"] = "L2rOlmoeForCausalLM"
auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES["l2r_vit"] = "L2rViTForImageClassification"

# Transformers runs these for a few of its own model types alone.
tp.TP_DISTRIBUTED_TEST_MODEL_TYPES = ep.EP_DISTRIBUTED_TEST_MODEL_TYPES = None


class LanguageTester:
    """A tiny OLMoE and a batch for it."""

    is_training = True
    batch_size = 5
    seq_length = 7
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 2
    vocab_size = 99

    def __init__(
        self, config_class: Any, base_model_class: Any, causal_lm_class: Any, **config_options: Any
    ) -> None:
        self.config_class = config_class
        self.base_model_class = base_model_class
        self.causal_lm_class = causal_lm_class
        self.config_options = config_options

    def get_config(self) -> Any:
        return self.config_class(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **self.config_options,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        shape = [self.batch_size, self.seq_length]
        inputs = {
            "input_ids": ids_tensor(shape, self.vocab_size),
            "attention_mask": torch.ones_like(random_attention_mask(shape)),
        }
        return self.get_config(), inputs


class VisionTester:
    """A tiny ViT, with experts in its second block where it is ours, and a batch for it."""

    is_training = True
    batch_size = 5
    image_size = 14
    patch_size = 2
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4
    seq_length = (14 // 2) ** 2 + 1
    mask_length = seq_length - 1
    num_masks = mask_length // 2  # patches that a masked image hides

    def __init__(self, config_class: Any, **config_options: Any) -> None:
        self.config_class = config_class
        self.config_options = config_options

    def get_config(self) -> Any:
        return self.config_class(
            image_size=self.image_size,
            patch_size=self.patch_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            intermediate_size=37,  # transformers' own tester; no multiple of 16 bytes
            **self.config_options,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        pixels = floats_tensor([self.batch_size, 3, self.image_size, self.image_size])
        return self.get_config(), {"pixel_values": pixels}


class LanguageSuite(
    ModelTesterMixin,
    GenerationTesterMixin,
    TrainingTesterMixin,
    tp.TensorParallelTesterMixin,
    ep.ExpertParallelTesterMixin,
):
    """Every test that transformers runs on one of its language models."""

    test_all_params_have_gradient = False  # an expert may get no token


class VisionSuite(ModelTesterMixin):
    """Every test that transformers runs on its ViT."""

    test_all_params_have_gradient = False
    test_resize_embeddings = False

    @unittest.skip("a ViT has no token embeddings")
    def test_inputs_embeds(self) -> None:
        """Skipped in transformers' own file too."""

    @unittest.skip("a ViT has no token embeddings")
    def test_model_get_set_embeddings(self) -> None:
        """Skipped here: patches are embedded by a convolution."""


class StockOlmoe(LanguageSuite, unittest.TestCase):
    all_model_classes = (OlmoeModel, OlmoeForCausalLM)

    def setUp(self) -> None:
        self.model_tester = LanguageTester(OlmoeConfig, OlmoeModel, OlmoeForCausalLM)


class L2rOlmoe(LanguageSuite, unittest.TestCase):
    all_model_classes = (L2rOlmoeModel, L2rOlmoeForCausalLM)
    kind = "l2r_sips"

    def setUp(self) -> None:
        classes = (L2rOlmoeConfig, L2rOlmoeModel, L2rOlmoeForCausalLM)
        self.model_tester = LanguageTester(*classes, router={"kind": self.kind})

    def test_moe_models_record_router_logits(self) -> None:
        """Skipped without a decorator in the source of the model; ours has stock's experts."""
        with mock.patch.object(inspect, "getmodule", return_value=modeling_olmoe):
            super().test_moe_models_record_router_logits()


class L2rOlmoeLinear(L2rOlmoe):
    kind = "linear"


@contextmanager
def older_names() -> Iterator[None]:
    """Map from the names that the tensors of a ViT once had, for our ViT too."""
    register = conversions.register_checkpoint_conversion_mapping
    stock = conversions.get_checkpoint_conversion_mapping("ViTModel")
    register("L2rViTModel", stock, overwrite=True)
    try:
        yield
    finally:
        register("L2rViTModel", [], overwrite=True)


class StockViT(VisionSuite, unittest.TestCase):
    all_model_classes = (ViTModel, ViTForImageClassification)

    def setUp(self) -> None:
        self.model_tester = VisionTester(ViTConfig)


class L2rViT(VisionSuite, unittest.TestCase):
    all_model_classes = (L2rViTModel, L2rViTForImageClassification)

    def setUp(self) -> None:
        self.model_tester = VisionTester(L2rViTConfig, num_experts=4, moe_layers=[1])

    def test_reverse_loading_mapping(self) -> None:
        """Skipped without older names of tensors, which ours never had; with stock's it runs."""
        with older_names():
            super().test_reverse_loading_mapping()

    def test_can_load_from_already_mapped_keys(self) -> None:
        """Skipped without older names of tensors, which ours never had; with stock's it runs."""
        with older_names():
            super().test_can_load_from_already_mapped_keys()
