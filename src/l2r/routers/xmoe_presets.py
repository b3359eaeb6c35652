"""X-MoE as three code bases have it; see docs/paper-notes.md for where they disagree."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "torchscale": {
        "rank": 16,
        "anchor_scale": 0.32,
        "anchor_norm": 1.5,
        "normalize_query": False,
    },
    "fairseq": {
        "rank": 16,
        "anchor_scale": 0.1,
        "eps": 1e-4,
        "temperature": 0.07,
        "learn_temperature": True,
        "min_temperature": 1e-4,
        "gate": "sigmoid",
    },
    "tutel": {
        "rank": 256,
        "bias": True,
        "anchor_init": "normal",
        "anchor_scale": 0.01,
        "temperature": 0.5,
        "learn_temperature": True,
        "min_temperature": 0.01,
    },
}
