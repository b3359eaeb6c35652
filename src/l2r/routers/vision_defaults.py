"""What the paper changes in a router for vision models."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from l2r.routers.config import RouterConfig, registered

# BatchNorm of |q| instead of RMSNorm of the input (Section 3.3), 4 anchors (Section 4.3).
_DEFAULTS = {"query_norm": "batchnorm", "heads": 4}


def vision_router(values: Mapping[str, Any]) -> RouterConfig:
    """RouterConfig from its dictionary form, with the vision settings where none are given.

    Raises ValueError for unknown kinds or options.
    """
    if "kind" not in values:
        return RouterConfig.from_dict(values)
    fields = {field.name for field in dataclasses.fields(registered(values["kind"]).config)}
    defaults = {name: value for name, value in _DEFAULTS.items() if name in fields}
    return RouterConfig.from_dict({**defaults, **values})
