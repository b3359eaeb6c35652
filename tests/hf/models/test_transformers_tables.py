"""transformers and PEFT find our models in every list in which they find the family's."""

import importlib
import pkgutil
import sys
from collections.abc import Mapping

import pytest
import torch
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoImageProcessor,
    AutoTokenizer,
    OlmoeConfig,
    OlmoeForCausalLM,
    Trainer,
    TrainingArguments,
    ViTImageProcessor,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models import auto

import l2r
from l2r.hf.models import (
    L2rOlmoeConfig,
    L2rOlmoeForCausalLM,
    L2rViTConfig,
    L2rViTForImageClassification,
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

# Lists that ask no name of ours, and why.
ELSEWHERE = {
    "_import_structure": "what transformers' own files define",
    "_class_to_module": "the same",
    "_modules": "the same",
    "CONFIG_MAPPING_NAMES": "CONFIG_MAPPING finds ours",
    "CONFIG_TO_TYPE": "the same",
    "SPECIAL_MODEL_TYPE_TO_MODULE_NAME": "where transformers has a file of another name",
    "_MODEL_TO_CONVERSION_PATTERN": "read into the cache of conversions, which has ours",
    "GGUF": "no GGUF file holds ours",
}
# Of our own models, which have a tokenizer of their own and tensors under the model's names.
OWN_ELSEWHERE = ("TOKENIZER_MAPPING_NAMES", "_checkpoint_conversion_mapping_cache")


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


def entries(table, names, depth=0):
    """Which of the names are keys or values of a table, or of one inside it."""
    if isinstance(table, str):
        return {table} & names
    if isinstance(table, Mapping):
        return entries([*table, *table.values()], names, depth)
    if isinstance(table, list | tuple | set | frozenset) and depth < 3:
        return set().union(*(entries(item, names, depth + 1) for item in table))
    return set()


def lists(names):
    """Names of transformers' and PEFT's lists, with the names that stand in each."""
    found = {}
    for module, contents in modules():
        for name, table in list(vars(contents).items()):
            if name.startswith("__") or any(part in name for part in ELSEWHERE):
                continue
            if isinstance(table, Mapping | list | tuple | set | frozenset):
                here = entries(table, names)
                if here:
                    found[f"{module}.{name}"] = here
    return found


def classes_of(stock, ours):
    """Names of the family's classes and configuration, with ours."""
    base, made = CONFIG_MAPPING[stock], CONFIG_MAPPING[ours]
    pairs = {stock: ours, base.__name__: made.__name__}
    theirs = {auto: kind.__name__ for auto, kind in class_registry.auto_models(base)}
    for auto_class, kind in class_registry.auto_models(made):
        pairs[theirs[auto_class]] = kind.__name__
    return pairs


def test_a_norm_inside_a_router_keeps_its_name_in_a_checkpoint():
    """DeepSeek-V4 renames every ``.norm.``, Ernie 4.5 VL every ``norm.``; for stock models still."""
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
    expected, found = lists(set(pairs)), lists(set(pairs.values()))
    assert {"MODEL_MAPPING_NAMES"} < {name.rpartition(".")[2] for name in expected}
    lacking = {
        name: names
        for name, theirs in expected.items()
        if (names := {pairs[n] for n in theirs} - found.get(name, set()))
        and not ((stock, ours) in OWN and name.endswith(OWN_ELSEWHERE))
    }
    assert lacking == {}
