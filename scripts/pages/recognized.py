"""Recognize the routers of an architecture that is in no table, on small random models of it."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModel

from l2r.hf.swap.sites import recognition_note
from scripts.pages.architectures import MODELS, NEW, RECOGNIZED, Architecture, model_types
from tests.hf.family_sizes import TINY

# The names that families give to their number of experts, and layers that are not dense.
SIZES = {**TINY, **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8)}
SIZES |= {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
LARGEST = 50_000_000  # parameters


def looked_at(architecture: Architecture) -> Architecture:
    """The same, or ``recognized``: small models are built of each of its configurations."""
    if architecture.state != NEW:
        return architecture
    for kind in model_types(MODELS / architecture.name):
        for model in small_models(kind):
            if note := recognition_note(model):
                return replace(architecture, state=RECOGNIZED, why=note.partition("; ")[2])
    return architecture


def small_models(kind: str) -> Iterator[Any]:
    """Random text models of a model type: its own sizes small, or those of its text model."""
    for sizes in (SIZES, {"text_config": SIZES}):
        # What transformers says of sizes that do not go together is of any kind.
        with suppress(Exception), torch.random.fork_rng():
            config = AutoConfig.for_model(kind, **sizes).get_text_config()
            with torch.device("meta"):
                parameters = AutoModel.from_config(config).num_parameters()
            if parameters < LARGEST:  # a size that has another name stays as it was
                torch.manual_seed(0)
                yield AutoModel.from_config(config).eval()
