"""Small random models of every supported family; their sizes stand in family_sizes.py."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from l2r.hf.swap.families import FAMILIES, Family
from l2r.hf.swap.sites import Site, old_weight, router_sites
from tests import tiers
from tests.hf.family_sizes import AROUND, OWN_SIZES, TINY

# Their layers run several times in a call, so a token has several routes in a layer.
LOOPED = ("inkling2_loop_text",)
# Checks that find a fault in a stock model: DeepSeek-V4 compresses keys of neighbouring tokens,
# those under the mask too.
FAULTS = {"deepseek_v4": {"padding"}}

BY_RULE = tuple({f.rule: name for name, f in reversed([*FAMILIES.items()])}.values())
# And models unlike others of their rule: a bias of logits, layers of two kinds, a wrapper, a loop.
OF_EACH_RULE = (*BY_RULE, "gpt_oss", "jamba", "qwen3_vl_moe", *LOOPED)
# Parts of these compute in float32 whatever the model's dtype: only opening a folder sees to it.
KEEP_FLOAT32 = ("inkling2_text", "inkling2_loop_text")

_KINDS = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification)


def each_rule(names: Iterable[str]) -> list[Any]:
    """Families of models by name; one of each rule of selection is fast."""
    return tiers.few(names, OF_EACH_RULE, "every family")


def each_rule_and_dtype(names: Iterable[str]) -> Any:
    """Parametrize by ``name`` and ``dtype``: fast are each rule in fp32, a few families in bf16."""
    fast = {
        torch.float32: OF_EACH_RULE,
        torch.bfloat16: (*tiers.FAMILIES, KEEP_FLOAT32[0]),
    }
    cases = [(name, dtype) for name in names for dtype in fast]
    few = tiers.few(cases, lambda case: case[0] in fast[case[1]], "every family and dtype")
    ids = [f"{name}-{'fp32' if dtype == torch.float32 else 'bf16'}" for name, dtype in cases]
    return pytest.mark.parametrize(("name", "dtype"), few, ids=ids)


def tiny_config(name: str, **sizes: Any) -> Any:
    """The configuration of a small model of a family, by its model type."""
    own = {**TINY, **OWN_SIZES[name], **sizes}
    values = {**AROUND[name], "text_config": own} if name in AROUND else own
    return CONFIG_MAPPING[name](**values)


def auto_class(config: Any) -> Any:
    """The Auto class of transformers whose models a configuration builds."""
    return next(kind for kind in _KINDS if type(config) in kind._model_mapping)


def tiny_model(family: Family, **sizes: Any) -> Any:
    """Build a small random model of a family, with routers that prefer some experts clearly."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = tiny_config(family.model_type, **sizes)
        model = auto_class(config).from_config(config).eval()
        with torch.no_grad():
            for site in router_sites(model):
                old_weight(site).normal_(0, 0.5)
                bias = getattr(site.router, "bias", None)
                if bias is not None:  # gpt-oss adds one to its logits; no router of ours does
                    bias.zero_()
            for name, value in [*model.named_parameters(), *model.named_buffers()]:
                if name.endswith(("e_score_correction_bias", "expert_bias")):
                    value.normal_(0, 0.3).clamp_(-0.45, 0.45)  # none is out of reach of sigmoids
                if name.endswith("tid2eid"):  # a token's experts differ from each other
                    value.copy_(torch.rand(len(value), 8).argsort(dim=1)[:, : value.shape[1]])
    return model


def from_folder(name: str, folder: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A small model of a family, as transformers opens it from a folder."""
    model = tiny_model(FAMILIES[name])
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=dtype).eval()


def matrix_of_logits(site: Site) -> Tensor:
    """A copy of the [N, D] matrix that gives a family's logits, Muse Spark's factor included."""
    return old_weight(site).detach() * getattr(site.router, "output_multiplier", 1.0)


def sample_tokens(rows: int = 2) -> Tensor:
    """Draw fixed token ids, without special ones."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, TINY["vocab_size"], (rows, 12), generator=generator)
