"""Where a checkpoint's weights go, and in which dtype: memory, several devices, or disk."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from l2r.machine import available_memory, device_name, pick_device
from l2r.runs.reading import indexed_files

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
_FLOATS = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # in files
_ROOM = 0.7  # of the free memory for weights; the rest is for what the work takes


@dataclass(frozen=True)
class Placement:
    """How a checkpoint is loaded.

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
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        device_name(self.device)
        self._check_map(device_name)

    def here(self) -> "Placement":
        """The same on this machine, whose GPU the device ``auto`` is, where there is one.

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
            options["max_memory"] = {"cpu": int(_ROOM * available_memory())}
        return options

    def place(self, model: Any) -> Any:
        """The model on the device, unless accelerate has placed its parts."""
        return (
            model if getattr(model, "hf_device_map", None) else model.to(pick_device(self.device))
        )

    def is_too_large(self, folder: Path) -> bool:
        """Whether weights on a CPU would take more than the memory that is free."""
        return (
            self.device == "cpu" and weight_bytes(folder, self.dtype) > _ROOM * available_memory()
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
        return max(0, weight_bytes(folder, self.dtype) - int(_ROOM * available_memory()))

    def _read_map(self) -> Any:
        text = self.device_map
        if text is None or text in _MAPS:
            return text
        try:
            places = json.loads(text)
        except ValueError:
            places = None
        if not isinstance(places, dict) or not places or "auto" in places.values():
            raise ValueError(
                f"device_map must be one of {', '.join(_MAPS)} or the JSON of modules and their "
                f'devices, such as {{"model": "cpu", "lm_head": "disk"}}; got {text!r}'
            )
        return places

    def _check_map(self, check: Callable[[str], object]) -> None:
        """Call ``check`` with the name of every device in the map."""
        places = self._read_map()
        for place in places.values() if isinstance(places, dict) else ():
            if place != "disk":
                try:
                    check(f"cuda:{place}" if isinstance(place, int) else str(place))
                except ValueError as error:
                    raise ValueError(f"device_map: {error}") from None


def weight_bytes(folder: Path, dtype: str = "auto") -> int:
    """Bytes that a folder's weights take in memory: floats in ``dtype``, integers as stored.

    Pickled weights count as their files do, whatever the dtype.
    """
    return sum(_bytes_of_file(file, dtype) for file in weight_files(folder))


def _bytes_of_file(file: Path, dtype: str) -> int:
    from safetensors import SafetensorError, safe_open

    total = 0
    try:
        with safe_open(file, "pt") as stream:
            for name in stream.keys():  # noqa: SIM118  # no mapping
                tensor = stream.get_slice(name)
                stored = tensor.get_dtype()
                loaded = _FLOATS.get(dtype, stored) if stored in _FLOATS.values() else stored
                bits = re.search(r"\d+", loaded)  # BOOL has none
                total += math.prod(tensor.get_shape()) * int(bits[0] if bits else 8) // 8
    except SafetensorError:  # pickled, or damaged, which loading refuses with its name
        return file.stat().st_size
    return total


def weight_files(folder: Path) -> list[Path]:
    """The files of weights in a folder: safetensors of the index, the one, or all, or pickles."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return [file for file in indexed_files(index) if file.is_file()]
    every = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    return every or sorted(folder.glob("pytorch_model*.bin"))
