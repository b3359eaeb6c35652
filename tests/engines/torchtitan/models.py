"""Small torchtitan layers with our gates, made as its command line makes them."""

import dataclasses
import warnings

import pytest
import torch

pytest.importorskip("torchtitan", reason="torchtitan has an environment of its own: make engines")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchtitan.config import Configurable
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models.common.config_utils import (
        make_moe_config,
        make_routed_experts_config,
        make_router_config,
    )

WIDTH, EXPERTS, TOP_K = 32, 4, 2
TARGET = "l2r.engines.torchtitan.l2r_gate"
X = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))
UP = torch.randn(2, 8, EXPERTS, generator=torch.Generator().manual_seed(2))


def normal(weight):
    torch.nn.init.normal_(weight, std=0.02)


@dataclasses.dataclass(kw_only=True, slots=True)
class Root(Configurable.Config):
    """A configuration whose modules are named as in a model."""

    moe: object = None


def configuration(router, *, shard=None, **fields):
    """One MoE layer, its gate replaced as a user of the command line replaces it.

    ``shard`` writes layouts into the configuration, which torchtitan does before it overrides.
    """
    experts = {"w1_EFD": normal, "w2_EDF": normal, "w3_EFD": normal}
    config = make_moe_config(
        num_experts=EXPERTS,
        router=make_router_config(
            dim=WIDTH,
            num_experts=EXPERTS,
            gate_param_init={"weight": normal},
            top_k=TOP_K,
            score_func="softmax",
            **fields,
        ),
        routed_experts=make_routed_experts_config(
            dim=WIDTH,
            hidden_dim=16,
            num_experts=EXPERTS,
            top_k=TOP_K,
            param_init=experts,
            comm_backend="standard",
        ),
    )
    if shard is not None:
        shard(config)
    root = Root(moe=Root(moe=config))
    (line,) = apply_overrides(OverrideConfig(imports=[(TARGET, router)]), root)
    assert "moe.moe.router.gate" in line
    return config


def built(router, **fields):
    torch.manual_seed(0)
    layer = configuration(router, **fields).build()
    layer.init_states()
    return layer
