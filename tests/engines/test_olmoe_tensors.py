"""Values go between our model and an engine's state whole, or not at all."""

import pytest
import torch

from l2r.engines.olmoe_tensors import copy_all, olmoe
from l2r.routers import LinearConfig
from tests.hf.families import TINY


def all_pairs(ours, theirs):
    for name in list(ours.left):
        yield ours.take(name), theirs.take(name)


@pytest.mark.parametrize("to_engine", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_not_copied(to_engine, value):
    sizes = {name: size for name, size in TINY.items() if not name.startswith("moe_")}
    model = olmoe(LinearConfig(), **sizes, num_experts=4)
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    name = "model.layers.1.mlp.gate.weight"
    (model.state_dict() if to_engine else state)[name].view(-1)[5] = value
    target = state if to_engine else model.state_dict()
    before = {key: tensor.clone() for key, tensor in target.items()}
    with pytest.raises(ValueError, match=r"not finite .*model\.layers\.1\.mlp\.gate\.weight"):
        copy_all(model, state, all_pairs, to_engine=to_engine)
    assert all(torch.equal(target[key], tensor) for key, tensor in before.items())
