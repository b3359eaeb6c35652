"""Routers whose weights stay in float32 under OLMo-core's FSDP policy.

    model = config.build(init_device="meta")
    shard_routers(model)  # before OLMo-core's trainer or model.apply_fsdp gets it

With ``param_dtype=bfloat16`` the policy of a block rounds the weights of what is in it, and a
rounded router chooses other experts. OLMo-core has no option that spares a module.
"""

from functools import wraps
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from l2r.engines.engine import require
from l2r.errors import InputError

require("ai2-olmo-core")

_FLOAT32 = MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=False)


def shard_routers(model: Any) -> None:
    """Let ``model.apply_fsdp`` shard every router by itself, with weights in float32.

    ``model`` is one of OLMo-core's, with its own routers or ours. Raises InputError where
    FSDP was applied already.
    """
    if model.fsdp_enabled:
        raise InputError("shard_routers must come before model.apply_fsdp; it was applied already")
    plain = model.apply_fsdp

    @wraps(plain)
    def apply_fsdp(dp_mesh: DeviceMesh | None = None, *rest: Any, **named: Any) -> None:
        for block in model.blocks.values():
            if block.is_moe:
                fully_shard(block.router, mesh=dp_mesh, mp_policy=_FLOAT32)
        plain(dp_mesh, *rest, **named)

    model.apply_fsdp = apply_fsdp
