"""What a folder holds by its files: a checkpoint, of which kind, with a tokenizer or without.

Nothing here reads weights or imports torch: commands refuse a bad folder before they do.
"""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from l2r.errors import InputError
from l2r.runs.folder import RunFolder
from l2r.runs.reading import MAX_BYTES, read_json, refuse_endless, refuse_pointer

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
_REPLACED = ("config.json", "README.md", "*.index.json")  # by the new folder's own
_UNTRUE = ("adapter_*", "trainer_state.json")  # of a folder with other weights


def checkpoint_folder(path: str | Path) -> Path:
    """The Hugging Face folder meant by ``path``: itself, or ``model/`` of a run folder.

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
    """Whether the field ``architectures`` of a config.json names an image classifier."""
    names = architectures if isinstance(architectures, list) else []
    return any("ImageClassification" in str(name) for name in names)


def is_image_classifier(path: str | Path) -> bool:
    """Whether a Hugging Face or run folder holds an image classifier, by its config.json.

    Raises ValueError when there is no config.json.
    """
    folder = checkpoint_folder(path)
    # some of transformers' have infinities
    config = read_json(folder / "config.json", strict=False)
    return classifies_images(config.get("architectures"))


def averaged_folder(path: str | Path) -> Path:
    """The folder of the moving average of a run's weights. Raises ValueError where it has none."""
    folder = Path(path) / "model-ema"
    if not (folder / "config.json").is_file():
        raise InputError(f"{path} holds no averaged weights; train with training.ema_decay > 0")
    return folder


def check_is_language_model(folder: Path, path: str | Path) -> None:
    """Raise ValueError where a folder, called ``path`` by its user, holds an image classifier."""
    if is_image_classifier(folder):
        raise InputError(f"{path} holds an image classifier, not a language model")


def has_tokenizer(path: str | Path) -> bool:
    """Whether a Hugging Face or run folder holds a tokenizer, by the names of its files."""
    folder = checkpoint_folder(path)
    return any((folder / name).is_file() for name in _TOKENIZERS)


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """The tokenizer_config.json of a folder; empty where there is none."""
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
