"""Placement of a checkpoint's weights: dtype, and memory, several devices, or disk."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from l2r.errors import InputError
from l2r.files.reading import indexed_files, parse_json
from l2r.hf.models.layouts import Layout, layout_of
from l2r.machine import available_memory, device_name, pick_device

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_FLOATS = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # in files
_MEMORY_SHARE = 0.7  # of the free memory for weights; the rest is for what the work takes


@dataclass(frozen=True)
class Placement:
    """Dtype and devices with which a checkpoint is loaded.

    dtype: of the weights, "auto" for the one they were saved in; routers of ours stay float32.
    device: of the whole model, "auto" for a GPU where there is one. device_map: accelerate's, a
    name or the JSON of a dictionary from modules to devices, "disk" among them; None is one device,
    and for weights that do not fit into a CPU's free memory "auto", which leaves layers on disk
    until they run; ``report`` takes the line that says so.
    Raises ValueError for an unknown dtype, map or name of a device; the machine is asked by
    ``here`` and before weights are read.
    """

    dtype: str = "auto"
    device: str = "cpu"
    device_map: str | None = None
    report: Callable[[str], object] = field(default=lambda line: None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        device_name(self.device)
        self._check_map(device_name)

    def here(self) -> "Placement":
        """Return the same on this machine, whose GPU the device ``auto`` is, where there is one.

        Raises ValueError for a device that is not here.
        """
        self._check_map(pick_device)
        return replace(self, device=pick_device(self.device))

    def options(self, folder: Path) -> dict[str, Any]:
        """Keywords of ``from_pretrained`` for the checkpoint in ``folder``; raises as ``here``."""
        import torch

        here = self.here()
        dtype = self.dtype if self.dtype == "auto" else getattr(torch, self.dtype)
        places = self._read_map()
        if places is None and here.is_too_large(folder):
            self._check_disk(folder)
            places = "auto"
            self.report(
                f"weights of {weight_bytes(folder, self.dtype) / 1e9:.1f} GB do not fit into "
                f"{available_memory() / 1e9:.1f} GB of free memory: layers stay on disk until "
                "they run, and every forward pass reads them again"
            )
        if places is None:
            return {"dtype": dtype}
        options: dict[str, Any] = {"dtype": dtype, "device_map": places}
        if isinstance(places, str) and here.device == "cpu":
            options["max_memory"] = {"cpu": int(_MEMORY_SHARE * available_memory())}
        return options

    def place(self, model: Any) -> Any:
        """Return the model on the device, unless accelerate has placed its parts."""
        return (
            model if getattr(model, "hf_device_map", None) else model.to(pick_device(self.device))
        )

    def is_too_large(self, folder: Path) -> bool:
        """Say whether weights on a CPU would take more than the memory that is free."""
        return (
            self.device == "cpu"
            and weight_bytes(folder, self.dtype) > _MEMORY_SHARE * available_memory()
        )

    def _check_disk(self, folder: Path) -> None:
        """Raise ValueError for weights that are computed as codes: none of them stays on disk."""
        layout = layout_of(folder)
        if layout is not None and layout.packed:
            raise InputError(
                f"weights of {weight_bytes(folder, self.dtype) / 1e9:.1f} GB do not fit into "
                f"{available_memory() / 1e9:.1f} GB of free memory, and {layout.name} weights "
                "cannot stay on disk"
            )

    def bytes_on_disk(self, folder: Path) -> int:
        """Bytes of weights that every forward pass reads again, since memory does not hold them.

        Raises ValueError for a map that does not tell.
        """
        places = self._read_map()
        if places is None and not self.is_too_large(folder):
            return 0
        if isinstance(places, dict) and "disk" not in places.values():
            return 0
        if isinstance(places, dict) or self.device != "cpu":
            raise ValueError("device_map does not tell how much stays on disk")
        return max(0, weight_bytes(folder, self.dtype) - int(_MEMORY_SHARE * available_memory()))

    def _read_map(self) -> Any:
        text = self.device_map
        if text is None or text in _MAPS:
            return text
        try:
            places = parse_json(text.encode(errors="backslashreplace"), strict=False)
        except ValueError:
            places = None
        if not isinstance(places, dict) or not places or "auto" in places.values():
            raise InputError(
                f"device_map must be one of {', '.join(_MAPS)} or the JSON of modules and their "
                f'devices, such as {{"model": "cpu", "lm_head": "disk"}}; got {text!r:.200}'
            )
        return places

    def _check_map(self, check: Callable[[str], object]) -> None:
        """Call ``check`` with the name of every device in the map."""
        places = self._read_map()
        for place in places.values() if isinstance(places, dict) else ():
            if place != "disk":
                try:
                    check(f"cuda:{place}" if isinstance(place, int) else str(place))
                except InputError as error:
                    raise InputError(f"device_map: {error}") from None


class WeightSizes(NamedTuple):
    """A folder's weights. layout: words on how they are quantized and computed, or empty.

    stored: bytes in the files. held: bytes in memory.
    """

    layout: str
    stored: int
    held: int


def weight_sizes(folder: Path, dtype: str = "auto") -> WeightSizes:
    """Sizes of a folder's weights, in memory with floats in ``dtype`` and integers as stored.

    Codes of a quantizer that are unpacked count as what they become. Pickled weights count as
    their files do, whatever the dtype.
    """
    layout = layout_of(folder) if (folder / "config.json").is_file() else None
    header: dict[str, tuple[str, list[int]]] = {}
    pickled = 0
    for file in weight_files(folder):
        tensors = _read_header(file)
        header |= tensors or {}
        pickled += file.stat().st_size if tensors is None else 0
    stored = sum(_bytes(kind, shape) for kind, shape in header.values())
    held = sum(_held(name, *tensor, dtype, layout) for name, tensor in header.items())
    words = "" if layout is None else layout.describe(header, dtype)
    return WeightSizes(words, stored + pickled, held + pickled)


def weight_bytes(folder: Path, dtype: str = "auto") -> int:
    """Bytes that a folder's weights take in memory; see ``weight_sizes``."""
    return weight_sizes(folder, dtype).held


def _held(name: str, kind: str, shape: list[int], dtype: str, layout: Layout | None) -> int:
    if layout is not None:
        wanted = _FLOATS[layout.dtype if dtype == "auto" else dtype]
        unpacked = layout.bytes_in_memory(name, kind, shape, _bits(wanted) // 8)
        if unpacked is not None:
            return unpacked
    return _bytes(_FLOATS.get(dtype, kind) if kind in _FLOATS.values() else kind, shape)


def _bytes(kind: str, shape: list[int]) -> int:
    return math.prod(shape) * _bits(kind) // 8


def _bits(kind: str) -> int:
    """Bits of a number of a dtype in a file, such as F8_E4M3 or BOOL."""
    found = re.search(r"\d+", kind)
    return int(found[0]) if found else 8


def _read_header(file: Path) -> dict[str, tuple[str, list[int]]] | None:
    """Dtypes and shapes in a safetensors file; None where it is pickled or damaged.

    Loading refuses a damaged one with its name.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as stream:
            parts = {n: stream.get_slice(n) for n in stream.keys()}  # noqa: SIM118  # no mapping
            return {n: (part.get_dtype(), part.get_shape()) for n, part in parts.items()}
    except SafetensorError:
        return None


def weight_files(folder: Path) -> list[Path]:
    """List the files of weights in a folder: safetensors of the index, the one, all, or pickles."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return [file for file in indexed_files(index) if file.is_file()]
    every = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    return every or sorted(folder.glob("pytorch_model*.bin"))
