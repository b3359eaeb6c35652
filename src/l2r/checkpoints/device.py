"""Where a checkpoint runs."""

import torch


def pick_device(name: str) -> str:
    """``auto`` is a GPU where there is one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
