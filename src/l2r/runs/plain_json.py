"""Writes JSON that every parser reads: it has no NaN and no infinities, which become null."""

import json
import math
from typing import Any


def plain_json(value: Any, *, indent: int | None = 2) -> str:
    """JSON text of a value; null where a number is not finite. Without ``indent`` on one line."""
    separators = (",", ":") if indent is None else None
    return json.dumps(_finite(value), indent=indent, separators=separators, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
