"""Description of this machine for runs and benchmarks, so that their numbers can be read later.

torch is imported where it is asked: the name of a device is checked without.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from l2r._version import __version__
from l2r.errors import InputError

# Kinds of device that torch knows by itself and can compute on; its plugins, the packages in
# _BACKENDS, name others.
_KINDS = ("cpu", "cuda", "hpu", "ipu", "lazy", "maia", "mps", "mtia", "vulkan", "xla", "xpu")
_BACKENDS = "torch.backends"
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "triton")
_CPUINFO = Path("/proc/cpuinfo")  # of Linux
_NUMBERS = {"family": "cpu family", "model": "model", "stepping": "stepping"}  # in it
_VECTORS = ("sse", "ssse", "avx", "fma", "f16c", "amx", "asimd", "sve", "bf16", "i8mm")
_PROCESS, _TREE = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")  # of Linux


def describe_machine() -> dict[str, Any]:
    """Versions of the packages that matter, processor, threads and accelerators."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    packages = {name: _version(name) for name in _PACKAGES}
    packages["torch"] = str(torch.__version__)  # with its build, which PyPI's metadata leave out
    return {
        "python": platform.python_version(),
        # Of this code, which an installation that can be edited may have outgrown.
        "packages": {"l2r-moe": __version__, **packages},
        "processor": _processor(),
        "instructions": _instructions(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda": torch.version.cuda if gpus else None,
    }


def device_name(name: str) -> str:
    """Return the name, if it can be a device's. Raises ValueError otherwise; asks no machine."""
    match = re.fullmatch(r"([a-z]+)(:\d+)?", name)
    known = match is not None and (
        name == "auto" or match[1] in _KINDS or importlib.metadata.entry_points(group=_BACKENDS)
    )
    if not known:
        raise InputError(f"device must be auto, cpu, cuda or cuda:0; got {name!r}")
    return name


def pick_device(name: str) -> str:
    """Return a device of this machine; ``auto`` is a GPU where there is one.

    Raises ValueError for a name that is no device, and for a device that is not here.
    """
    import torch

    if device_name(name) == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device must be one of this machine; got {name!r}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        here = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "no GPU"
        raise InputError(f"device must be auto or cpu here, {here} found; got {name!r}")
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):  # torch's, by kind of device
        raise InputError(f"device must be one of this machine; got {name!r}") from None
    return name


def available_memory() -> int:
    """Bytes that this process may still take: the machine's, or what its control group leaves."""
    import psutil  # of the lm extra

    free: int = psutil.virtual_memory().available
    limit = group_limit()
    return free if limit is None else min(free, limit - psutil.Process().memory_info().rss)


def group_limit(process: Path = _PROCESS, tree: Path = _TREE) -> int | None:
    """Bytes that the control group of a process allows, as containers have; None for no limit.

    ``process`` lists its groups and ``tree`` has their folders, of version 1 and of version 2.
    """
    try:
        groups = process.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    limits = []
    for group in groups:
        _, kinds, path = group.split(":", 2)
        root = tree / ("memory" if kinds == "memory" else "")
        name = "memory.limit_in_bytes" if kinds == "memory" else "memory.max"
        for folder in (root / path.lstrip("/"), root):  # inside a container it is the root
            with suppress(OSError, ValueError):
                limits.append(int((folder / name).read_text(encoding="utf-8")))
    return min(limits, default=None)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """Name of the processor; ``platform`` knows the kind alone on Linux."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def _instructions() -> dict[str, Any]:
    """Describe what a processor's name leaves open: its numbers, and what it can compute.

    family, model, stepping: as the vendor counts; None where they are not told. flags: those of
    vectors and matrices, by which libraries choose their sums. digest: of all flags.
    """
    told = _cpuinfo()
    flags = sorted(told.get("flags", told.get("Features", "")).split())
    numbers = {name: told.get(key) for name, key in _NUMBERS.items()}
    return {
        "vendor": told.get("vendor_id"),
        **{name: int(v) if v and v.isdigit() else None for name, v in numbers.items()},
        "flags": [flag for flag in flags if flag.startswith(_VECTORS)],
        "digest": hashlib.sha256(" ".join(flags).encode()).hexdigest()[:12] if flags else None,
    }


def _cpuinfo() -> dict[str, str]:
    """Read what Linux tells of the first processor; nothing elsewhere."""
    if not _CPUINFO.exists():
        return {}
    first = _CPUINFO.read_text(encoding="utf-8").partition("\n\n")[0]
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}
