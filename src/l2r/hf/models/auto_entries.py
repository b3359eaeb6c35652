"""Entries of our models in transformers' Auto classes."""

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig


def add_to_auto_classes(config: Any, models: Mapping[Any, Any]) -> None:
    """Let AutoConfig and the Auto classes in ``models`` make ours by the model type."""
    AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto, model in models.items():
        auto.register(config, model, exist_ok=True)
