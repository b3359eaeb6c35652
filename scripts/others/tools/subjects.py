"""Tiny models that every tool gets: stock families, the same swapped, and our own OLMoE."""

import functools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from l2r import L2RConfig
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import router_sites
from l2r.hf.swap.swap import replace_routers
from tests.hf.families import TINY, sample_tokens, tiny_model

NAMES = ("olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "granitemoe")
LOOP_FAMILIES = ("deepseek_v3", "mixtral", "gpt_oss")  # a contract each
ROUTER = L2RConfig(rank=2, heads=4)
# bitsandbytes packs blocks of 64 numbers.
SIZES = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
IDS = sample_tokens()


class Subject(NamedTuple):
    """A model, made anew by each call: ``kind`` is stock, swapped or own."""

    kind: str
    family: str

    def model(self) -> Any:
        """The model in evaluation mode, in fp32, with the same weights every time."""
        family = FAMILIES[self.family]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            if self.kind == "own":
                sizes = {**TINY, **SIZES}
                del sizes["moe_intermediate_size"]
                config = L2rOlmoeConfig(**sizes, num_experts=8, router=ROUTER.to_dict())
                return L2rOlmoeForCausalLM(config).eval()
            model = tiny_model(family, **SIZES)
            return replace_routers(model, ROUTER) if self.kind == "swapped" else model

    @property
    def folder(self) -> Path:
        """The model and a tokenizer as a Hugging Face folder, written once per process."""
        return _saved(self)

    @property
    def router(self) -> str:
        """Name of the router in its block: ``gate`` or ``router``."""
        return router_sites(self.model())[0].path.rpartition(".")[2]

    @property
    def router_weight(self) -> str:
        """Name of a matrix of the router that the input meets."""
        names = dict(router_sites(self.model())[0].router.named_parameters())
        return next(n for n in ("projection.weight", "weight", "layer.weight") if n in names)


SUBJECTS = (
    *(Subject("stock", name) for name in NAMES),
    *(Subject("swapped", name) for name in NAMES),
    Subject("own", "olmoe"),
)
_FOLDERS = TemporaryDirectory()


@functools.cache
def _saved(subject: Subject) -> Path:
    folder = Path(_FOLDERS.name) / f"{subject.kind}-{subject.family}"
    subject.model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of words, w3 to w63."""
    words = {0: "<pad>", 1: "<unk>", 2: "<eos>"}
    vocab = {words.get(i, f"w{i}"): i for i in range(TINY["vocab_size"])}
    backend = Tokenizer(models.WordLevel(vocab, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Logits of the sample tokens in evaluation mode."""
    was = model.training
    scores: Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    model.train(was)
    return scores


def largest_difference(a: Any, b: Any) -> float:
    """Largest difference between the logits of two models."""
    return float((logits(a).float() - logits(b).float()).abs().max())


def in_routers(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters of the routers, by name."""
    for site in router_sites(model):
        for name, parameter in site.router.named_parameters():
            yield f"{site.path}.{name}", parameter
