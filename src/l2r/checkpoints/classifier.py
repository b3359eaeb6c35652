"""Load any Hugging Face image classifier folder, ours included."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageClassification

from l2r.checkpoints.pretrained import checkpoint_folder


def load_image_classifier(
    path: str | Path, *, averaged: bool = False, dtype: torch.dtype = torch.float32
) -> Any:
    """Model in evaluation mode from a Hugging Face folder or a run folder of ours.

    ``averaged`` takes the moving average of the weights (``model-ema/`` of a run). Raises
    ValueError when the folder holds no readable image classifier.
    """
    if averaged:
        folder = Path(path) / "model-ema"
        if not (folder / "config.json").is_file():
            raise ValueError(f"{path} holds no averaged weights; train with training.ema_decay > 0")
    else:
        folder = checkpoint_folder(path)
    try:
        model = AutoModelForImageClassification.from_pretrained(folder, dtype=dtype)
    except Exception as error:  # transformers lets any error of a damaged folder through
        raise ValueError(f"cannot load an image classifier from {folder}: {error}") from error
    return model.eval()


def is_image_classifier(path: str | Path) -> bool:
    """Whether a Hugging Face or run folder holds an image classifier, by its config.json.

    Raises ValueError when there is no config.json.
    """
    folder = checkpoint_folder(path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return any("ImageClassification" in name for name in config.get("architectures") or [])
