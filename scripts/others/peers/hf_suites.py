"""Transformers' own test classes around stock models and ours; pytest collects this file.

``tests`` is the folder of transformers' source distribution, put on the path by ``__main__``.
The testers below give their mixins what every model gives them: a tiny configuration and inputs.
A class is named MODE_FAMILY, as in cases.py. Stock models run in a process without l2r.
"""

import importlib.util
import inspect
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tests.generation.test_utils import GenerationTesterMixin
from tests.test_configuration_common import ConfigTester
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
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.olmoe import modeling_olmoe

from tests import test_expert_parallel_mixin as ep
from tests import test_tensor_parallel_mixin as tp


def _load(path: Path) -> Any:
    """A module of this project by its file: ``tests`` is another package here."""
    spec = importlib.util.spec_from_file_location(f"_peers_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_HERE = Path(__file__).resolve().parent
blocks, cases = _load(_HERE / "blocks.py"), _load(_HERE / "cases.py")
sizes = _load(_HERE.parents[2] / "tests" / "hf" / "family_sizes.py")

# Transformers runs these for a few of its own model types alone.
tp.TP_DISTRIBUTED_TEST_MODEL_TYPES = ep.EP_DISTRIBUTED_TEST_MODEL_TYPES = None


class LanguageTester:
    """A tiny language model and a batch for it."""

    is_training = True
    batch_size = 5
    seq_length = 7
    vocab_size = 64

    def __init__(self, classes: tuple[Any, ...], make_config: Callable[[], Any]) -> None:
        self.base_model_class, self.causal_lm_class = classes[0], classes[-1]
        self.get_config = make_config
        config = make_config()
        self.config_class = type(config)
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            setattr(self, name, getattr(config, name))

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


def _configuration_test(name: str) -> Callable[[Any], None]:
    def test(self: Any) -> None:
        given = self.config_values()
        getattr(ConfigTester(self, config_class=self.model_tester.config_class, **given), name)()

    return test


class ConfigurationTests:
    """Transformers' tests of a configuration class, each a test of its own."""

    def config_values(self) -> dict[str, Any]:
        """What the configuration is made with besides its defaults."""
        return {"hidden_size": 48}


for _name in vars(ConfigTester):
    if _name.startswith(("create_and_test_", "check_config_")):
        setattr(ConfigurationTests, f"test_{_name}", _configuration_test(_name))


class LanguageSuite(
    ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin, ConfigurationTests
):
    """Every test that transformers runs on one of its language models, in one process."""

    test_all_params_have_gradient = False  # an expert may get no token
    # Skipped for old models, by the year in the file of the configuration, which ours has not.
    test_can_init_all_missing_weights_before_2023 = True


class ParallelSuite(LanguageSuite, tp.TensorParallelTesterMixin, ep.ExpertParallelTesterMixin):
    """The same and those of two processes."""


class VisionSuite(ModelTesterMixin, ConfigurationTests):
    """Every test that transformers runs on its ViT."""

    test_all_params_have_gradient = False
    test_can_init_all_missing_weights_before_2023 = True
    test_resize_embeddings = False

    @unittest.skip("a ViT has no token embeddings")
    def test_inputs_embeds(self) -> None:
        """Skipped in transformers' own file too."""

    @unittest.skip("a ViT has no token embeddings")
    def test_model_get_set_embeddings(self) -> None:
        """Skipped here: patches are embedded by a convolution."""

    @unittest.skip("a ViT has no vocabulary")
    def test_create_and_test_config_common_properties(self) -> None:
        """Skipped here: transformers' own file leaves the vocabulary out."""


_OLMOE = {**sizes.TINY, **sizes.OWN_SIZES["olmoe"]}


class StockOlmoe(ParallelSuite, unittest.TestCase):
    all_model_classes = (OlmoeModel, OlmoeForCausalLM)

    def setUp(self) -> None:
        self.model_tester = LanguageTester(self.all_model_classes, lambda: OlmoeConfig(**_OLMOE))


class L2rOlmoe(ParallelSuite, unittest.TestCase):
    kind = "l2r_sips"

    @classmethod
    def setUpClass(cls) -> None:
        from l2r.hf.models import L2rOlmoeForCausalLM
        from l2r.hf.models.olmoe import L2rOlmoeModel

        cls.all_model_classes = (L2rOlmoeModel, L2rOlmoeForCausalLM)
        # The tests read from these lists what a class computes, such as whether it takes labels.
        auto.MODEL_MAPPING_NAMES["l2r_olmoe"] = "L2rOlmoeModel"
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["l2r_olmoe"] = "L2rOlmoeForCausalLM"

    def setUp(self) -> None:
        from l2r.hf.models import L2rOlmoeConfig

        def make() -> Any:
            return L2rOlmoeConfig(**_OLMOE, **self.config_values())

        self.model_tester = LanguageTester(self.all_model_classes, make)

    def config_values(self) -> dict[str, Any]:
        from l2r.routers import make_config

        return {"router": make_config(self.kind).to_dict()}

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
    @classmethod
    def setUpClass(cls) -> None:
        from l2r.hf.models import L2rViTForImageClassification
        from l2r.hf.models.vit import L2rViTModel

        cls.all_model_classes = (L2rViTModel, L2rViTForImageClassification)
        auto.MODEL_MAPPING_NAMES["l2r_vit"] = "L2rViTModel"
        names = auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
        names["l2r_vit"] = "L2rViTForImageClassification"

    def setUp(self) -> None:
        from l2r.hf.models import L2rViTConfig

        self.model_tester = VisionTester(L2rViTConfig, num_experts=4, moe_layers=[1])

    def test_reverse_loading_mapping(self) -> None:
        """Skipped without older names of tensors, which ours never had; with stock's it runs."""
        with older_names():
            super().test_reverse_loading_mapping()

    def test_can_load_from_already_mapped_keys(self) -> None:
        """Skipped without older names of tensors, which ours never had; with stock's it runs."""
        with older_names():
            super().test_can_load_from_already_mapped_keys()


class FamilySuite(LanguageSuite):
    """A family's model, stock or swapped, by itself or inside a block."""

    family = ""
    mode = ""

    @classmethod
    def setUpClass(cls) -> None:
        cls.values = _values(cls.family)
        kind = CONFIG_MAPPING[cls.family]
        kinds = [kind, auto.MODEL_MAPPING[kind], auto.MODEL_FOR_CAUSAL_LM_MAPPING[kind]]
        if cls.mode in cases.SWAPPED:
            cls.values["l2r_swap"], *kinds = _swapped(cls.values, *kinds)
        cls.config_class, *classes = kinds
        cls.all_model_classes = tuple(classes)

    def setUp(self) -> None:
        self.model_tester = LanguageTester(
            self.all_model_classes, lambda: self.config_class(**deepcopy(self.values))
        )
        if self.mode in blocks.BLOCKS:
            self.enterContext(blocks.around_every_model(self.mode, self.all_model_classes))

    def config_values(self) -> dict[str, Any]:
        own = {"l2r_swap": self.values["l2r_swap"]} if self.mode in cases.SWAPPED else {}
        return super().config_values() | deepcopy(own)

    def test_moe_models_record_router_logits(self) -> None:
        """Skipped without a decorator in the source of the model; a swapped one has stock's."""
        stock = CONFIG_MAPPING[self.family]
        module = inspect.getmodule(auto.MODEL_MAPPING[stock])
        with mock.patch.object(inspect, "getmodule", return_value=module):
            super().test_moe_models_record_router_logits()


def _values(family: str) -> dict[str, Any]:
    """Sizes of a tiny model; the size of a head too, which tests of positions read."""
    values = {**sizes.TINY, **sizes.OWN_SIZES[family]}
    config = CONFIG_MAPPING[family](**values)
    if getattr(config, "head_dim", 0) is None:
        values["head_dim"] = values["hidden_size"] // values["num_attention_heads"]
    return values


def _swapped(values: Any, kind: Any, base: Any, lm: Any) -> tuple[Any, ...]:
    """Swaps of a configuration, and its class and those of models whose routers are swapped."""
    from l2r import L2RConfig
    from l2r.hf.swap import class_registry
    from l2r.hf.swap.swap import replace_routers

    with torch.random.fork_rng():
        swapped = replace_routers(lm(kind(**values)), L2RConfig(rank=2, heads=4))
    prefix = type(swapped).__name__.removesuffix(lm.__name__)
    classes = [getattr(class_registry, f"{prefix}{each.__name__}") for each in (base, lm)]
    tables = auto.MODEL_MAPPING_NAMES, auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for table, each in zip(tables, classes, strict=True):
        table[swapped.config.model_type] = each.__name__
    return (swapped.config.l2r_swap, type(swapped.config), *classes)


for _mode, _family in cases.FAMILY_CASES:
    _name = f"{_mode.capitalize()}_{_family}"
    _body = {"family": _family, "mode": _mode, "__module__": __name__}
    globals()[_name] = type(_name, (FamilySuite, unittest.TestCase), _body)
