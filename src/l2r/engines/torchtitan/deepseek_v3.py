"""torchtitan's DeepSeek-V3 with our adapter, seeds and float32 gates, for its command line:

    torchrun ... -m torchtitan.train --module l2r.engines.torchtitan.deepseek_v3 \\
        --config deepseek_v3_16b \\
        --override.imports 'l2r.engines.torchtitan.l2r_gate={"kind": "l2r_sips", "rank": 2}'

Every configuration of torchtitan.models.deepseek_v3 has its name here.
"""

from collections.abc import Callable
from typing import Any

from torchtitan.models.deepseek_v3 import config_registry
from torchtitan.models.deepseek_v3 import model_registry as _model_registry

from l2r.engines.torchtitan.spec import configurations, with_routers


def model_registry(flavor: str, **options: Any) -> Any:
    """torchtitan's ModelSpec of a flavor, as its own ``model_registry``, with our parts."""
    return with_routers(_model_registry(flavor, **options))


def __getattr__(name: str) -> Callable[[], Any]:
    return configurations(config_registry, name)


def __dir__() -> list[str]:
    return [*globals(), *(name for name in dir(config_registry) if name.startswith("deepseek_v3"))]
