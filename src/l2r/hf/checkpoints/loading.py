"""Load a language model with its tokenizer, or an image classifier, ours or Hugging Face's."""

from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForImageClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from l2r.hf.checkpoints.folders import (
    averaged_folder,
    check_is_language_model,
    checkpoint_folder,
    has_tokenizer,
)
from l2r.hf.checkpoints.foreign_tokenizer import open_tokenizer
from l2r.hf.checkpoints.hub import local_checkpoint
from l2r.hf.checkpoints.placement import Placement
from l2r.hf.checkpoints.pretrained import cannot_load, load_pretrained
from l2r.hf.models.weight_files import read_config, read_weights
from l2r.hf.swap.sites import recognition_note

FLOAT32 = Placement("float32")


def load_causal_lm(
    path: str | Path,
    *,
    placement: Placement = FLOAT32,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Model in evaluation mode and its tokenizer, or None where the folder has none.

    ``path`` is a folder in Hugging Face format, a run folder of ours (its ``model/``) or a hub
    id; ``revision`` and ``trust_remote_code`` as for ``load_pretrained``.
    Raises ValueError when the folder holds no readable checkpoint.
    """
    folder = checkpoint_folder(local_checkpoint(path, revision=revision, code=trust_remote_code))
    check_is_language_model(folder, path)
    return load_model(folder, placement=placement, trust_remote_code=trust_remote_code)


def load_model(
    folder: Path, *, placement: Placement, trust_remote_code: bool = False
) -> tuple[Any, Any]:
    """Load a language model or an image classifier, and its tokenizer or None, from a folder.

    ``placement.report`` takes a line on routers that are in no table.
    """
    options = placement.options(checkpoint_folder(folder))
    model = load_pretrained(folder, trust_remote_code=trust_remote_code, **options)
    if note := recognition_note(model):
        placement.report(note)
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    return placement.place(model).eval(), tokenizer


def load_config(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Read the configuration of a checkpoint.

    Raises ValueError where it is damaged, or needs code that is not trusted.
    """
    folder = checkpoint_folder(path)
    try:
        return read_config(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # of any kind, as for the model
        raise cannot_load("a configuration", folder, error) from error


def load_tokenizer(path: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a folder or run folder, None where it has none.

    Raises ValueError for one that cannot be read or needs code of the folder that is not trusted.
    """
    if not has_tokenizer(path):
        return None
    return _tokenizer(checkpoint_folder(path), trust_remote_code=trust_remote_code)


def load_image_classifier(
    path: str | Path,
    *,
    averaged: bool = False,
    placement: Placement = FLOAT32,
    trust_remote_code: bool = False,
) -> Any:
    """Model in evaluation mode from a Hugging Face folder or a run folder of ours.

    ``averaged`` takes the moving average of the weights (``model-ema/`` of a run). Raises
    ValueError when the folder holds no readable image classifier.
    """
    folder = averaged_folder(path) if averaged else checkpoint_folder(path)
    try:
        model = read_weights(
            AutoModelForImageClassification,
            folder,
            trust_remote_code=trust_remote_code,
            **placement.options(folder),
        )
    except Exception as error:  # transformers lets any error of a damaged folder through
        raise cannot_load("an image classifier", folder, error) from error
    return placement.place(model).eval()


def hugging_face_tokenizer(path: Path) -> Any:
    """The Hugging Face tokenizer of a folder, or of a ``tokenizer.json`` by itself.

    Raises ValueError for one that cannot be read or needs code of its folder.
    """
    folder = path if path.is_dir() else path.parent
    if (folder / "tokenizer_config.json").is_file():
        return _tokenizer(folder, trust_remote_code=False)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return open_tokenizer(lambda: PreTrainedTokenizerFast(tokenizer_file=str(file)))
    except Exception as error:  # tokenizers raises bare Exception for an unreadable file
        raise cannot_load("a tokenizer", file, error) from error


def _tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    try:
        trusted = {"trust_remote_code": trust_remote_code}
        return open_tokenizer(lambda: AutoTokenizer.from_pretrained(folder, **trusted))
    except Exception as error:  # of any kind, as for a model
        raise cannot_load("a tokenizer", folder, error) from error
