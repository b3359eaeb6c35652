"""Model parts that torchtitan's command line needs: adapter, seeds, float32 gates.

    spec = with_routers(model_registry("30B-A3B"))

``l2r.engines.torchtitan.qwen3`` does it for ``--module``.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, wraps
from types import ModuleType
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from l2r.engines.engine import require
from l2r.engines.torchtitan import L2RGate
from l2r.engines.torchtitan.checkpoint import L2RQwen3StateDictAdapter
from l2r.errors import InputError

require("torchtitan")

from torchtitan.config.override import derive  # noqa: E402
from torchtitan.models.qwen3 import parallelize  # noqa: E402


def with_routers(spec: Any) -> Any:
    """Make a ModelSpec of torchtitan that saves our gates and keeps them in float32.

    Not under ``compile.enable``, which warns. Gates draw by the engine's seed and their layer,
    whatever the device. The gates themselves are replaced by ``--override.imports`` or
    ``apply_overrides``. Raises InputError for a model that has no adapter of ours.
    """
    if spec.name != "qwen3":
        raise InputError(f"the model must be qwen3, which has an adapter; got {spec.name}")
    plain = spec.parallelize_fn

    @wraps(plain)
    def parallelized(model: Any, **options: Any) -> Any:
        compiled = options["compile_config"]
        if compiled.enable and "model" in compiled.components:
            warnings.warn(
                "compile.enable: blocks are compiled whole, so FSDP rounds router weights to "
                "mixed_precision_param; leave compile off, or set that to float32",
                stacklevel=2,
            )
            return plain(model, **options)
        with _gates_first():
            return plain(model, **options)

    model = derive(spec.model, _numbering(type(spec.model)._owner).Config)
    return replace(
        spec, model=model, state_dict_adapter=L2RQwen3StateDictAdapter, parallelize_fn=parallelized
    )


def configurations(registry: ModuleType, name: str) -> Callable[[], Any]:
    """Return the function of torchtitan's configuration registry with this name, with our parts.

    Raises AttributeError where there is none.
    """
    plain = getattr(registry, name)
    if name.startswith("_") or getattr(plain, "__module__", "") != registry.__name__:
        raise AttributeError(f"torchtitan has no configuration {name}")

    @wraps(plain)
    def configured() -> Any:
        config = plain()
        config.model_spec = with_routers(config.model_spec)
        return config

    return configured


def shard_gates(
    model: Any,
    dp_mesh: Any,
    *,
    reduce_dtype: torch.dtype = torch.float32,
    dp_mesh_dims: Any = None,
    cpu_offload: bool = False,
) -> None:
    """Shard every gate by itself, with weights in float32, before torchtitan shards the layers."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    more: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if cpu_offload else {}
    if dp_mesh_dims is not None:
        more["dp_mesh_dims"] = dp_mesh_dims
    for gate in model.modules():
        if isinstance(gate, L2RGate):
            fully_shard(gate, mesh=dp_mesh, mp_policy=policy, **more)


@contextmanager
def _gates_first() -> Iterator[None]:
    """Let torchtitan's function that applies FSDP find the gates sharded inside the block."""
    plain: Callable[..., None] = parallelize.apply_fsdp_to_decoder

    def applied(model: Any, dp_mesh: Any, **options: Any) -> None:
        known = ("reduce_dtype", "dp_mesh_dims", "cpu_offload")
        shard_gates(model, dp_mesh, **{k: options[k] for k in known if k in options})
        plain(model, dp_mesh, **options)

    parallelize.apply_fsdp_to_decoder = applied
    try:
        yield
    finally:
        parallelize.apply_fsdp_to_decoder = plain


@cache
def _numbering(owner: Any) -> Any:
    """Return a torchtitan model that warns of what has no export; its gates know their layer."""

    class Model(owner):
        @dataclass(kw_only=True, slots=True)
        class Config(owner.Config):
            pass

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            L2RQwen3StateDictAdapter(config, None)  # warns

        def init_states(self, *, buffer_device: torch.device | None = None) -> None:
            for layer, block in self.layers.items():
                for gate in block.modules():
                    if isinstance(gate, L2RGate):
                        gate.plug.reseed(torch.initial_seed(), int(layer))
            super().init_states(buffer_device=buffer_device)

    Model.__name__ = Model.__qualname__ = f"L2R{owner.__name__}"
    return Model
