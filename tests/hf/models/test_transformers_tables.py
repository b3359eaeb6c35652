"""transformers and PEFT find our models in every list in which they find the family's."""

import importlib
import json
import pkgutil
import sys
from collections import OrderedDict, defaultdict

import pytest
import tokenizers
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoImageProcessor,
    AutoTokenizer,
    OlmoeConfig,
    OlmoeForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightTransform
from transformers.models import auto

import l2r
from l2r.hf.models import (
    L2rOlmoeConfig,
    L2rOlmoeForCausalLM,
    L2rViTConfig,
    L2rViTForImageClassification,
    transformers_tables,
)
from l2r.hf.swap import class_registry, swap_routers
from l2r.hf.swap.families import FAMILIES
from l2r.transformers_hook import type_name
from tests.hf.families import TINY, sample_tokens, tiny_model
from tests.tiers import few

# Models around a supported decoder, which a swap gives a type of ours too.
COMPOSITE = ("llava", "qwen3_5_moe")
SWAPPED = [(name, type_name(name)) for name in (*FAMILIES, *COMPOSITE) if name in CONFIG_MAPPING]
OWN = [("olmoe", "l2r_olmoe"), ("vit", "l2r_vit")]
FAST = [("mixtral", "l2r_mixtral"), ("phimoe", "l2r_phimoe"), ("llava", "l2r_llava"), *OWN]

TABLES = (dict, OrderedDict, defaultdict, list, tuple, set, frozenset)
# Lists in which ours need no place, by parts of their paths, and why.
ELSEWHERE = {
    ".__": "Python's",
    "transformers.models._": "what transformers' own files define",
    "CONFIG_MAPPING": "CONFIG_MAPPING makes ours when it is asked, as in these tests",
    "CONFIG_TO_TYPE": "the same, by the name of a configuration",
    "_auto.MISSING_": "merged into the lists of their names",
    "GGUF": "no GGUF file holds ours",
    "transformers.conversion_mapping._MODEL_TO_": "read into the cache of conversions, with ours",
    "peft.utils.transformers_weight_conversion._MOE_": "by the name of the conversion",
    "auto_docstring.HARDCODED_CONFIG_FOR_MODELS": "of docstrings",
}
# Our own OLMoE has a tokenizer of its own, and our ViT's files have the names of the model.
OWN_ELSEWHERE = (
    "TOKENIZER_MAPPING_NAMES",
    "SPECIAL_MODEL_TYPE_TO_MODULE_NAME",  # where tokenizers and the like are looked for
    "_checkpoint_conversion_mapping_cache",
)
BY_TYPE = "peft.utils.transformers_weight_conversion._MODEL_TO_CONVERSION_PATTERN"
PREPARING = {
    "tokenization": "TOKENIZER_MAPPING",
    "image_processing": "IMAGE_PROCESSOR_MAPPING",
    "video_processing": "VIDEO_PROCESSOR_MAPPING",
    "feature_extraction": "FEATURE_EXTRACTOR_MAPPING",
    "processing": "PROCESSOR_MAPPING",
}


def modules():
    """What asks for names: the Auto classes, Trainer, losses, generation, conversions, PEFT."""
    for name in ("trainer", "pipelines", "conversion_mapping", "modelcard", "generation.utils"):
        importlib.import_module(f"transformers.{name}")
    for found in pkgutil.iter_modules(auto.__path__, f"{auto.__name__}."):
        importlib.import_module(found.name)
    for name in ("constants", "transformers_weight_conversion"):
        importlib.import_module(f"peft.utils.{name}")
    families = "transformers.models."
    for name, module in list(sys.modules.items()):
        of_a_family = name.startswith(families) and not name.startswith(auto.__name__)
        if name.startswith(("transformers.", "peft.utils.")) and not of_a_family:
            yield name, module


def lists():
    """transformers' and PEFT's lists by their paths, but those that ours need no place in."""
    for module, contents in modules():
        for name, table in list(vars(contents).items()):
            path = f"{module}.{name}"
            if type(table) in TABLES and not any(part in path for part in ELSEWHERE):
                yield path, table


def entries(table, names, depth=0):
    """Which of the names are keys or values of a table, or of one inside it."""
    if isinstance(table, str):
        return {table} & names
    if depth > 3 or type(table) not in TABLES:
        return set()
    items = [*table, *table.values()] if isinstance(table, dict) else table
    return set().union(*(entries(item, names, depth + 1) for item in items))


def classes_of(stock, ours):
    """Names of the family's type, configuration and classes, with ours."""
    base, made = CONFIG_MAPPING[stock], CONFIG_MAPPING[ours]
    pairs = {stock: ours, base.__name__: made.__name__}
    theirs = {auto: kind.__name__ for auto, kind in class_registry.auto_models(base)}
    for auto_class, kind in class_registry.auto_models(made):
        pairs[theirs[auto_class]] = kind.__name__
    return pairs


def test_a_norm_inside_a_router_keeps_its_name_in_a_checkpoint():
    """DeepSeek-V4 renames each ``.norm.``, Ernie 4.5 VL each ``norm.``; for stock models still."""
    renamed = {}
    for stock, ours in SWAPPED:
        CONFIG_MAPPING[ours]
        for name in (stock, ours):
            for transform in get_checkpoint_conversion_mapping(name) or ():
                for router in ("gate", "router"):
                    key = f"0.{router}.norm.weight"
                    if not transform.rename_source_key(key)[0].endswith(key[2:]):
                        renamed.setdefault(name, transform.source_patterns)
    assert set(renamed) == {"deepseek_v4", "ernie4_5_vl_moe"}


@pytest.mark.parametrize(("stock", "ours"), few([*OWN, *SWAPPED], FAST, "every family"))
def test_ours_stand_in_every_list_in_which_the_familys_stand(stock, ours):
    pairs = classes_of(stock, ours)
    lacking, seen = {}, set()
    for path, table in lists():
        here = entries(table, {stock} if path == BY_TYPE else set(pairs))
        kind = table.get(stock) if isinstance(table, dict) else None
        if isinstance(kind, str) and kind[0].isupper() and "For" in kind and kind not in pairs:
            continue  # of a part of the whole model, or of what our ViT does not do
        missing = {pairs[name] for name in here} - entries(table, set(pairs.values()))
        if missing and not (ours in dict(OWN).values() and path.endswith(OWN_ELSEWHERE)):
            lacking[path] = missing
        seen |= {path} if here else set()
    assert lacking == {}
    assert "transformers.models.auto.modeling_auto.MODEL_MAPPING_NAMES" in seen and len(seen) > 5


@pytest.mark.parametrize(("stock", "ours"), few([OWN[1], *SWAPPED], FAST, "every family"))
def test_text_images_and_video_are_prepared_as_for_the_family(stock, ours):
    base, made = CONFIG_MAPPING[stock], CONFIG_MAPPING[ours]
    for file, name in PREPARING.items():
        table = getattr(importlib.import_module(f"transformers.models.auto.{file}_auto"), name)
        assert table.get(made, None) == table.get(base, None)


def causal():
    tiny = {k: v for k, v in TINY.items() if k != "moe_intermediate_size"}
    tiny |= {"num_experts": 4, "num_experts_per_tok": 2}
    stock = OlmoeForCausalLM(OlmoeConfig(**tiny))
    return {
        "stock": stock,
        "swapped": swap_routers(OlmoeForCausalLM(OlmoeConfig(**tiny)), l2r.L2RConfig(rank=2)),
        "own": L2rOlmoeForCausalLM(L2rOlmoeConfig(**tiny, router={"kind": "l2r_sips", "rank": 2})),
    }


@pytest.mark.parametrize("kind", ["stock", "swapped", "own"])
def test_trainer_smooths_the_labels_of_the_next_tokens(kind, tmp_path):
    model, ids = causal()[kind].eval(), sample_tokens()
    smoothed = TrainingArguments(
        str(tmp_path), label_smoothing_factor=0.1, report_to="none", use_cpu=True
    )
    loss = Trainer(model, smoothed).compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)  # the same sums in another order


def tokenizer_files(folder, named):
    words = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2, "<unk>": 3}, [("a", "b")])
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": named}))


@pytest.mark.parametrize("name", ["qwen3_5_moe_text", "mixtral"])
def test_a_tokenizer_that_names_a_wrong_class_opens_as_for_the_family(name, tmp_path):
    """Folders of some families name a class that is not theirs; transformers lists them."""
    model = tiny_model(FAMILIES[name])
    kinds = {}
    for kind in ("stock", "swapped"):
        model.save_pretrained(tmp_path / kind)
        tokenizer_files(tmp_path / kind, "LlamaTokenizer")
        kinds[kind] = AutoTokenizer.from_pretrained(tmp_path / kind)
        swap_routers(model, l2r.L2RConfig(rank=2))
    assert type(kinds["swapped"]) is type(kinds["stock"])
    assert kinds["swapped"]("ab ba").input_ids == kinds["stock"]("ab ba").input_ids


def test_images_of_our_vit_are_prepared_where_the_folder_names_no_class(tmp_path):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    config = L2rViTConfig(**sizes, num_hidden_layers=2, image_size=8, patch_size=4, num_experts=4)
    L2rViTForImageClassification(config).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 8, "width": 8}}')
    assert type(AutoImageProcessor.from_pretrained(tmp_path)).__name__ == "ViTImageProcessorPil"


def test_a_norm_inside_a_router_keeps_its_name_in_a_transformers_without_copies(monkeypatch):
    """DeepSeek-V4 renames each ``norm``; transforms of transformers 5.19 have no ``copy``."""

    def patterns():
        transformers_tables.share_conversion("l2r_deepseek_v4", "deepseek_v4")
        found = get_checkpoint_conversion_mapping("l2r_deepseek_v4")
        return [(t.source_patterns, t.target_patterns, t.scope_prefix) for t in found]

    usual = patterns()
    for kind in (WeightTransform, WeightConverter):
        monkeypatch.delattr(kind, "copy", raising=False)
    assert patterns() == usual
    assert usual != [
        (t.source_patterns, t.target_patterns, t.scope_prefix)
        for t in get_checkpoint_conversion_mapping("deepseek_v4")
    ]
