"""What a call of ours may leave behind, in a model, in the process and on the disk: README.md.

``State.of(model)`` before and after are compared by ``changes``, which names what differs.
"""

import gc
import hashlib
import json
import locale
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as module_globals
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

_HOOKS = "_hooks", "_hooks_with_kwargs", "_hooks_always_called"
_TENSORS = "_parameters", "_buffers", "_modules"
# Private flags that a forward of transformers or a first look of ours sets once, by design.
_CACHES = {"_compiled_call_impl"}


def state_of(model: nn.Module, *, values: bool = True, identities: bool = True) -> dict[str, Any]:
    """Everything of a model that a call may change, by name.

    values: the bits of its tensors too. identities: which objects they are; False compares a model
    with a copy of it.
    """
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        at = f"module {path or '(model)'}"
        found[f"{at}: class"] = type(module)
        found[f"{at}: mode"] = module.training
        own = vars(module)
        found[f"{at}: attributes"] = sorted(set(own) - _CACHES)
        found[f"{at}: children"] = list(module._modules)
        found[f"{at}: non-persistent buffers"] = sorted(module._non_persistent_buffers_set)
        for name, value in own.items():
            if name.endswith(_HOOKS):
                found[f"{at}: {name}"] = _hooks(value, identities)
            elif name not in (*_TENSORS, "_non_persistent_buffers_set") and _is_plain(value):
                found[f"{at}: {name}"] = repr(value)
            elif callable(value) and not isinstance(value, nn.Module | type):
                found[f"{at}: {name}"] = _function(value, identities)
        config = own.get("config")
        if config is not None:
            found[f"{at}: config"] = _config(config)
            if identities:
                found[f"{at}: config object"] = id(config)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[f"tensor {name}"] = _tensor(tensor, values, identities)
        grad = tensor.grad
        found[f"gradient of {name}"] = None if grad is None else _tensor(grad, True, identities)
    generation = getattr(model, "generation_config", None)
    found["generation config"] = None if generation is None else generation.to_dict()
    return found


def process_state(*, random_state: bool = True) -> dict[str, Any]:
    """What a call may change of the process, by name. random_state: the three generators too."""
    found = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "gradients are on": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [
            (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in ("cpu", "cuda")
        ],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "threads of torch": torch.get_num_threads(),
        "deterministic algorithms": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "precision of products": torch.get_float32_matmul_precision(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "dispatch modes": list(map(repr, _get_current_dispatch_mode_stack())),
        "function modes": torch._C._len_torch_function_stack(),
        "kernels of attention": (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
        "oneDNN": torch.backends.mkldnn.enabled,
        "hooks of all modules": {
            name: len(value)
            for name, value in vars(module_globals).items()
            if name.startswith("_global_") and isinstance(value, dict)
        },
        "environment": dict(os.environ),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "warnings filters": list(warnings.filters),
        "warnings are shown by": warnings.showwarning,
        "loggers": _loggers(),
        "verbosity of transformers": transformers.logging.get_verbosity(),
        "progress bars of transformers": transformers.logging.is_progress_bar_enabled(),
        "attention functions": sorted(transformers.AttentionInterface().keys()),
        "working folder": Path.cwd(),
        "import path": list(sys.path),
        "hooks of the interpreter": (sys.excepthook, sys.unraisablehook, threading.excepthook),
        "streams": (id(sys.stdout), id(sys.stderr), id(sys.stdin)),
        "recursion limit": sys.getrecursionlimit(),
        "trace functions": (sys.gettrace(), sys.getprofile()),
        "threads": sorted(t.name for t in threading.enumerate() if not t.daemon),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "printing of numpy": np.geterr(),
        "locale": locale.setlocale(locale.LC_ALL),
    }
    if random_state:
        kind, keys, *rest = np.random.get_state()
        found |= {
            "random state of torch": torch.get_rng_state().numpy().tobytes(),
            "random state of numpy": (kind, keys.tobytes(), *rest),
            "random state of python": random.getstate(),
        }
    return found


def files_in(*folders: Path) -> dict[str, str]:
    """Digests of every file below folders, by path."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for folder in folders
        for path in sorted(folder.rglob("*"))
    }


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What differs, by name, with both values."""
    return {
        name: (before.get(name), after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    }


def _tensor(tensor: Tensor, values: bool, identities: bool) -> tuple[Any, ...]:
    plain = (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.requires_grad,
        tensor.is_leaf,
        sorted(vars(tensor)),
        bool(tensor._backward_hooks),
        bool(getattr(tensor, "_post_accumulate_grad_hooks", None)),
    )
    bits: Any = None
    if values and not tensor.is_meta:
        whole = tensor.detach().cpu().contiguous().reshape(-1)
        bits = hashlib.sha256(whole.view(torch.uint8).numpy().tobytes()).hexdigest()
    return (*plain, bits, *((id(tensor), tensor.data_ptr()) if identities else ()))


def _hooks(hooks: Mapping[Any, Any], identities: bool) -> Any:
    return list(hooks) if identities else len(hooks)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set | dict):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _function(value: Any, identities: bool) -> Any:
    return id(value) if identities else getattr(value, "__qualname__", type(value).__name__)


def _config(config: Any) -> str:
    kept = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    private = {
        name: repr(value) for name, value in vars(config).items() if "implementation" in name
    }
    return json.dumps([type(config).__name__, kept, private], sort_keys=True, default=repr)


def _loggers() -> dict[str, Any]:
    """Levels, handlers and filters of loggers that have any of them."""
    every = {"": logging.getLogger(), **logging.Logger.manager.loggerDict}
    return {
        name: (log.level, log.disabled, log.propagate, list(log.handlers), list(log.filters))
        for name, log in every.items()
        if isinstance(log, logging.Logger) and (log.level or log.handlers or log.filters)
    }
