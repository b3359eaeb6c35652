"""What OLMo-core's balance loss adds, by its own layer's router, for the page."""

import sys
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import torch

pytest.importorskip("olmo_core", reason="OLMo-core has an environment of its own: make engines")

from olmo_core.nn.moe import MoEConfig, MoERouterConfig, MoEType

from scripts.others.coefficients import references
from scripts.others.coefficients.batch import COEFFICIENT, Added
from scripts.others.coefficients.measure import Loss, measure, write

pytestmark = pytest.mark.filterwarnings("ignore:Grouped GEMM not available")


def routers(granularity, gating, weights, top_k):
    """A router of each layer, with the weight of the loss that its MoE layer gives it."""
    layers, experts, width = weights.shape
    config = MoEConfig(
        name=MoEType.dropless,
        num_experts=experts,
        hidden_size=8,
        router=MoERouterConfig(top_k=top_k, gating_function=gating),
        lb_loss_weight=COEFFICIENT,
        lb_loss_granularity=granularity,
        z_loss_weight=None,
    )
    made = [config.build(width, n_layers=layers).router.train() for _ in weights]
    for router, weight in zip(made, weights, strict=True):
        with torch.no_grad():
            router.weight.copy_(weight.flatten())
    return made


def backward(made, x, divisor):
    found = sum(router(x, loss_div_factor=divisor)[3] for router in made)
    found.backward()
    return float(found.detach())


def gradient(made, weights):
    return torch.stack([router.weight.grad for router in made]).view_as(weights)


def balance(granularity, gating, x, weights, top_k, mask):
    """Its train module divides by the tokens that have a label, and no mask comes to the router."""
    made = routers(granularity, gating, weights, top_k)
    tokens = torch.tensor(x[..., 0].numel()) if mask is None else mask.sum()
    return Added(backward(made, x, tokens), gradient(made, weights))


def micro_batches(granularity, gating, x, weights, top_k):
    """Every row alone, divided by the tokens of all, as its train module does."""
    made = routers(granularity, gating, weights, top_k)
    for row in x:
        backward(made, row[None], torch.tensor(x[..., 0].numel()))
    return gradient(made, weights)


SEQUENCE = {"balance_scope": "sequence"}
# granularity, gating function, equation, factor, ours
KINDS = (
    ("local_batch", "softmax", references.over_k, "1 / k", {}),
    ("instance", "softmax", references.sequence, "1", SEQUENCE),
    ("instance", "sigmoid", references.sigmoid_sequence, "1", SEQUENCE),
)


def losses():
    for granularity, gating, reference, factor, here in KINDS:
        sigmoid = gating == "sigmoid"
        yield Loss(
            f"OLMo-core: `{granularity}`{', sigmoid' if sigmoid else ''}",
            partial(balance, granularity, gating),
            reference,
            factor,
            here,
            router="sigmoid" if sigmoid else "linear",
            micro_batches=partial(micro_batches, granularity, gating),
        )


def test_coefficients():
    rows = [measure(loss) for loss in losses()]
    write(Path(sys.prefix).name, metadata.version("ai2-olmo-core"), rows)
