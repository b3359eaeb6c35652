"""torchtitan's Qwen3-MoE with our adapter, seeds and float32 gates, for its command line:

    torchrun ... -m torchtitan.train --module l2r.engines.torchtitan.qwen3 \\
        --config qwen3_30b_a3b \\
        --override.imports 'l2r.engines.torchtitan.l2r_gate={"kind": "l2r_sips", "rank": 2}'

Every configuration of torchtitan.models.qwen3 has its name here.
"""

from collections.abc import Callable
from typing import Any

from torchtitan.models.qwen3 import config_registry
from torchtitan.models.qwen3 import model_registry as _model_registry

from l2r.engines.torchtitan.spec import configurations, with_routers


def model_registry(flavor: str, **options: Any) -> Any:
    """torchtitan's ModelSpec of a flavor, as its own ``model_registry``, with our parts."""
    return with_routers(_model_registry(flavor, **options))


def __getattr__(name: str) -> Callable[[], Any]:
    return configurations(config_registry, name)


def __dir__() -> list[str]:
    return [*globals(), *(name for name in dir(config_registry) if name.startswith("qwen3"))]
