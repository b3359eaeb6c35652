"""Checkpoints by a hub id: into huggingface_hub's cache, by its own rules for offline use."""

import re
from pathlib import Path

from l2r.errors import InputError, blames_input
from l2r.hf.checkpoints.folders import checkpoint_folder

_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.safetensors", "README.md")
_PICKLED = ("pytorch_model*.bin",)  # where there is nothing else; transformers reads numbers alone
_NOT_BELOW = ("*/*.safetensors", "*/*.json", "*/*.txt", "*/*.model", "*/*.bin")  # others' forms
# An organization or a person, and a model of theirs; huggingface_hub itself knows more rules.
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def local_checkpoint(
    checkpoint: str | Path, *, revision: str | None = None, code: bool = False
) -> Path:
    """The folder of a checkpoint: the one named, or a hub id's in huggingface_hub's cache.

    ``revision`` is a branch, a tag or a commit of a hub id. ``code`` takes its Python files too.
    A name without a slash, with several or with a dot before the first is a path: the hub is not
    asked. Environment variables (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE) are
    huggingface_hub's.
    Raises ValueError for what is neither, cannot be had, has no config.json, or has a revision and
    is a folder here.
    """
    path, name = Path(checkpoint), str(checkpoint)
    if path.exists():
        if revision is not None:
            raise InputError(f"revision is for hub ids; got revision={revision!r} with {path}")
        checkpoint_folder(path)
        return path
    if not _HUB_ID.fullmatch(name):
        raise InputError(
            f"checkpoint must be a folder with config.json, a run or a hub id; got {name}"
        )
    return _from_hub(name, revision, [*_FILES, *(["*.py"] if code else [])])


def _from_hub(name: str, revision: str | None, files: list[str]) -> Path:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = _snapshot(name, revision, files)
        if not any(folder.glob("*.safetensors")):
            _snapshot(name, revision, [*files, *_PICKLED])
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        if not blames_input(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            "checkpoint must be a folder with config.json, a run or a hub id; there is no folder "
            f"{name}, and of the hub: {reason}"
        ) from error
    checkpoint_folder(folder)
    return folder


def _snapshot(name: str, revision: str | None, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    taken = snapshot_download(
        name, revision=revision, allow_patterns=files, ignore_patterns=list(_NOT_BELOW)
    )
    return Path(taken)
