"""One number for everything in a checkpoint's folder that changes what is measured of it."""

import hashlib
from pathlib import Path

from l2r.runs.reading import file_sha256

# Files besides the weights that transformers builds model and tokenizer from.
_READ = (
    "config.json", "*.index.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.py",
)  # fmt: skip


def checkpoint_digest(folder: Path) -> str:
    """Changes with weights, configuration, tokenizer and code; reads no weights.

    Weights count by size and time, smaller files by their content.
    """
    weights = [path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")]
    small = {path for pattern in _READ for path in folder.glob(pattern) if path.is_file()}
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(weights)]
    contents = [(p.name, file_sha256(p)) for p in sorted(small)]
    return hashlib.sha256(repr((stats, contents)).encode()).hexdigest()
