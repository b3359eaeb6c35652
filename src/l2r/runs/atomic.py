"""Files that appear whole or not at all: temporary name, fsync, rename."""

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Write a text file so that a reader or a crash never meets half of it."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a binary file in the same way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    with temporary.open("wb") as stream:
        stream.write(content)
        os.fsync(stream.fileno())
    publish(temporary, path)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file in the same way; keys keep their order."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def publish(temporary: Path, path: Path) -> None:
    """Give a finished file its real name and store the new name."""
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
