"""torchtitan adds no balance loss; its load_balance_coeff is the speed of a bias, as ours."""

import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from l2r.routers import update_selection_bias
from scripts.others.coefficients.batch import COEFFICIENT
from scripts.others.coefficients.measure import difference, write
from tests.engines.engines import SIPS

from .models import EXPERTS, X, built

from torchtitan.components.optimizer import optimizer as titan  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore")


class Block(torch.nn.Module):
    """As much of a transformer block as the hook of torchtitan's optimizer asks."""

    moe_enabled = True

    def __init__(self, moe):
        super().__init__()
        self.moe = moe


def before_step(layer):
    """Run what torchtitan runs before each step of its optimizer."""
    hooks = []
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict({"0": Block(layer)})
    dims = SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=False, tp=1)
    titan.register_moe_load_balancing_hook(
        SimpleNamespace(register_step_pre_hook=hooks.append), [model], dims
    )
    (hook,) = hooks
    hook()


def test_coefficients():
    gradients = []
    for coefficient in (COEFFICIENT, None):
        layer = built(SIPS)
        layer.load_balance_coeff = coefficient
        layer(X).float().square().mean().backward()
        gradients.append([p.grad for p in layer.router.gate.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

    layer = built(SIPS)
    layer.load_balance_coeff = COEFFICIENT
    layer(X)
    loads = layer.tokens_per_expert_E.clone()
    assert loads.sum() > 0 and loads.unique().numel() > 2
    before_step(layer)
    own = torch.zeros(EXPERTS)
    update_selection_bias(own, loads.long(), speed=COEFFICIENT)
    # theirs takes the mean of the changes off: no choice of experts sees it
    found = difference(layer.expert_bias_E, own - own.mean())
    assert found < 1e-6
    write(Path(sys.prefix).name, metadata.version("torchtitan"), [], bias=found)
