"""Checkpoints by a hub id: into huggingface_hub's cache, by its own rules for offline use."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils._validators import validate_repo_id

_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors", "README.md")
_PICKLED = ("pytorch_model*.bin",)  # where there is nothing else; transformers reads numbers alone
_NOT_BELOW = ("*/*.safetensors", "*/*.json", "*/*.txt", "*/*.model", "*/*.bin")  # others' forms


def local_checkpoint(
    checkpoint: str | Path, *, revision: str | None = None, code: bool = False
) -> Path:
    """The folder of a checkpoint: the one named, or a hub id's in huggingface_hub's cache.

    ``revision`` is a branch, a tag or a commit of a hub id. ``code`` takes its Python files too.
    Environment variables (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE) are huggingface_hub's.
    Raises ValueError for what is neither, cannot be had, or has a revision and is a folder here.
    """
    path, name = Path(checkpoint), Path(checkpoint).as_posix()
    if path.exists():
        if revision is not None:
            raise ValueError(f"revision is for hub ids; got revision={revision!r} with {path}")
        return path
    try:
        validate_repo_id(name)
    except HFValidationError:
        raise ValueError(
            f"checkpoint must be a folder with config.json, a run or a hub id; got {path}"
        ) from None
    files = [*_FILES, *(["*.py"] if code else [])]
    try:
        folder = _snapshot(name, revision, files)
        if not any(folder.glob("*.safetensors")):
            _snapshot(name, revision, [*files, *_PICKLED])
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            "checkpoint must be a folder with config.json, a run or a hub id; there is no folder "
            f"{name}, and of the hub: {reason}"
        ) from error
    return folder


def _snapshot(name: str, revision: str | None, files: list[str]) -> Path:
    taken = snapshot_download(
        name, revision=revision, allow_patterns=files, ignore_patterns=list(_NOT_BELOW)
    )
    return Path(taken)
