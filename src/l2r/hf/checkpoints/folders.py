"""Folders of checkpoints, here or from the hub: their kind, their files, their digest.

Nothing here reads weights or imports torch: commands refuse a bad folder before they do.
"""

import hashlib
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from l2r.errors import InputError, blames_input
from l2r.files.folder import RunFolder
from l2r.files.reading import MAX_BYTES, file_sha256, read_json, refuse_endless, refuse_pointer

_PICKLED = ("pytorch_model*.bin",)  # where there is nothing else; transformers reads numbers alone
_OTHER_FORMATS = ("*/*.safetensors", "*/*.json", "*/*.txt", "*/*.model", "*/*.bin")  # other formats
# An organization or a person, and a model of theirs; huggingface_hub itself knows more rules.
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# One of these makes a tokenizer; merges.txt and the like go with them.
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "tekken.json",
)
# Files that transformers reads into memory, whole.
_READ_WHOLE = (
    "*config.json",
    "*tokens*.json",
    "*.index*.json",
    "chat_template*",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "tekken.json",
    "*.model",
)
_ADAPTER, _GGUF = "adapter_config.json", ".gguf"
# Of these kinds, the first that is there is read.
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
# Files beside the weights that prepare inputs, steer generation, describe a quantization or say
# what one may do; with code, where config.json asks for it.
_KEPT = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.y*ml",
    "*vocab*",
    "LICENSE*",
    "NOTICE*",
)
_TEMPLATES = "additional_chat_templates"
_HUB_FILES = (*_KEPT, "*.safetensors", "README.md")
_REPLACED = ("config.json", "README.md", "*.index.json")  # by the new folder's own
_UNTRUE = ("adapter_*", "trainer_state.json")  # of a folder with other weights
# Files besides the weights that transformers builds model and tokenizer from.
_DIGESTED = (
    "config.json", "*.index.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.py",
)  # fmt: skip


def local_checkpoint(
    checkpoint: str | Path, *, revision: str | None = None, code: bool = False
) -> Path:
    """Return the folder of a checkpoint: the one named, or a hub id's in huggingface_hub's cache.

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
    return _from_hub(name, revision, [*_HUB_FILES, *(["*.py"] if code else [])])


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
        name, revision=revision, allow_patterns=files, ignore_patterns=list(_OTHER_FORMATS)
    )
    return Path(taken)


def checkpoint_folder(path: str | Path) -> Path:
    """Return the Hugging Face folder meant by ``path``: itself, or ``model/`` of a run folder.

    Raises ValueError where neither has a config.json, where weights or a tokenizer are pointers of
    git-lfs, and for an adapter or a GGUF file without other weights, which it names; also where one
    of its files is a pipe or a device, whose bytes may never come, or too large to be read.
    """
    for folder in (Path(path), Path(path) / "model"):
        if (folder / "config.json").is_file():
            weights = next(filter(None, (sorted(folder.glob(kind)) for kind in _WEIGHTS)), [])
            others = [folder / name for name in ("config.json", *_TOKENIZERS)]
            for file in (*weights, *others):
                refuse_pointer(file)
            for kind in (*_WEIGHTS, *_READ_WHOLE):
                for file in sorted(folder.glob(kind)):
                    refuse_endless(file, None if kind in _WEIGHTS else MAX_BYTES)
            if not weights and (words := _other_layout(folder)):
                raise InputError(words)
            return folder
    raise InputError(
        _other_layout(Path(path))
        or f"checkpoint must be a folder with config.json or model/config.json; got {path}"
    )


def _other_layout(path: Path) -> str:
    """Words on what a path holds in place of a checkpoint; empty where it is nothing known."""
    if (path / _ADAPTER).is_file():
        base = read_json(path / _ADAPTER, strict=False).get("base_model_name_or_path")
        of = f", {base}" if isinstance(base, str) and base.isprintable() else ""
        return (
            f"{path} holds an adapter without its model{of}; merge the "
            "two into a copy (peft's merge_and_unload, save_pretrained) and take that"
        )
    files = [path] if path.suffix == _GGUF and path.is_file() else sorted(path.glob(f"*{_GGUF}"))
    if files:
        return (
            f"{files[0]} is a GGUF file of llama.cpp; take the checkpoint that it was made from, "
            "or write a copy with transformers (AutoModelForCausalLM.from_pretrained(FOLDER, "
            "gguf_file=NAME), save_pretrained)"
        )
    return ""


def classifies_images(architectures: Any) -> bool:
    """Say whether the field ``architectures`` of a config.json names an image classifier."""
    names = architectures if isinstance(architectures, list) else []
    return any("ImageClassification" in str(name) for name in names)


def is_image_classifier(path: str | Path) -> bool:
    """Say whether a Hugging Face or run folder holds an image classifier, by its config.json.

    Raises ValueError when there is no config.json.
    """
    folder = checkpoint_folder(path)
    # some of transformers' have infinities
    config = read_json(folder / "config.json", strict=False)
    return classifies_images(config.get("architectures"))


def averaged_folder(path: str | Path) -> Path:
    """Return the folder of a run's averaged weights. Raises ValueError if there is none."""
    folder = Path(path) / "model-ema"
    if not (folder / "config.json").is_file():
        raise InputError(f"{path} holds no averaged weights; train with training.ema_decay > 0")
    return folder


def check_is_language_model(folder: Path, path: str | Path) -> None:
    """Raise ValueError where a folder, called ``path`` by its user, holds an image classifier."""
    if is_image_classifier(folder):
        raise InputError(f"{path} holds an image classifier, not a language model")


def has_tokenizer(path: str | Path) -> bool:
    """Say whether a Hugging Face or run folder holds a tokenizer, by the names of its files."""
    folder = checkpoint_folder(path)
    return any((folder / name).is_file() for name in _TOKENIZERS)


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Return the tokenizer_config.json of a folder; empty where there is none."""
    file = folder / "tokenizer_config.json"
    settings = read_json(file, strict=False) if file.is_file() else {}
    return settings if isinstance(settings, dict) else {}


def kept_files(path: str | Path, *, code: bool = False) -> list[Path]:
    """Files of a folder or run folder that a copy of its model keeps: tokenizer, processors.

    ``code``: those in Python too. Raises ValueError for a link to a file elsewhere, which a copy
    would hold and its user might publish; links within the folder and those of a snapshot in the
    hub's cache are followed.
    """
    folder = checkpoint_folder(path)
    kept = (*_KEPT, "*.py") if code else _KEPT
    files = [
        file
        for file in sorted([*folder.iterdir(), *(folder / _TEMPLATES).glob("*.jinja")])
        if file.is_file()
        and _is_one(file, kept)
        and not _is_one(file, (*_REPLACED, *_UNTRUE, ".*"))
    ]
    whole = folder.resolve()
    homes = [whole]
    if whole.parent.name == "snapshots":
        homes.append(whole.parent.with_name("blobs"))
    for file in files:
        target = file.resolve()
        if not any(target.is_relative_to(home) for home in homes):
            raise InputError(
                f"{file} is a link to {target}, a file of another folder, which a copy would "
                "hold; put the file itself in its place"
            )
    return files


def _is_one(file: Path, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(file.name, pattern) for pattern in patterns)


def files_left_out(path: str | Path, new: Path, weights: Collection[Path]) -> list[str]:
    """Names in a folder or run folder that a folder made from it lacks; hidden ones do not count.

    ``weights`` are the files from which the weights were read.
    """
    there = {file.name for file in weights} | {entry.name for entry in new.iterdir()}
    return [
        f"{entry.name}/" if entry.is_dir() else entry.name
        for entry in sorted(checkpoint_folder(path).iterdir())
        if entry.name not in there and not _is_one(entry, (*_REPLACED, ".*"))
    ]


def check_reads(path: str | Path, data: str | Path | None) -> None:
    """Raise ValueError where ``data``, None for what a model reads by itself, cannot be read.

    That is text without a tokenizer, or images that neither ``data`` nor a run's recipe names.
    """
    if not is_image_classifier(path):
        check_reads_text(path, data, option="--data")
    elif data is None and not RunFolder(path).is_run():
        raise InputError(f"{path} is no run folder, so --data must name images")


def check_reads_text(
    path: str | Path, source: str | Path | None = None, *, option: str | None = None
) -> None:
    """Raise ValueError where text is to be read and a folder has no tokenizer for it.

    ``source`` is what is read: text, or a folder of token files, which need no tokenizer.
    ``option`` is how a command calls it, None where it takes no token files.
    """
    is_tokens = source is not None and (Path(source) / "manifest.json").is_file()
    if is_tokens or has_tokenizer(path):
        return
    or_tokens = f", or pass a folder of token files as {option}" if option else ""
    raise InputError(
        "the checkpoint has no tokenizer to read text with: put its tokenizer.json into "
        f"{checkpoint_folder(path)}{or_tokens}"
    )


def checkpoint_digest(folder: Path) -> str:
    """Hash every file that affects results: weights, configuration, tokenizer and code.

    Weights count by size and time and are not read; smaller files count by their content.
    """
    weights = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")]
    small = {path for pattern in _DIGESTED for path in folder.glob(pattern) if path.is_file()}
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(weights)]
    contents = [(p.name, file_sha256(p)) for p in sorted(small)]
    return hashlib.sha256(repr((stats, contents)).encode()).hexdigest()
