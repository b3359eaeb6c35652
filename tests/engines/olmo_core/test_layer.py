"""OLMo-core's layer with our plug is our OLMoE layer: logits, losses, weights, gradients."""

import pytest
import torch

from l2r.functional import load_balancing_loss, router_z_loss
from l2r.routers import capture
from tests.engines.engines import (
    ROUTERS,
    assert_close,
    backward_in_float64,
    check_gradients,
    next_token_loss,
    periodic,
)

from .models import LAYERS, VOCABULARY, WEIGHTS, small

from l2r.engines.olmoe_tensors import OlmoeTensors  # isort: skip
from l2r.engines.olmo_core.checkpoint import _pairs, to_hugging_face  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore:Grouped GEMM not available")


@pytest.mark.engine("olmo-core", "aux losses equal")
@pytest.mark.parametrize("reordered_norm", [False, True])
@pytest.mark.parametrize("kind", ROUTERS)
def test_model_equals_ours(kind, reordered_norm):
    _, model = small({"kind": kind, **ROUTERS[kind]}, reordered_norm=reordered_norm)
    if reordered_norm:  # no norm stands before its first router: entries of order one there too
        with torch.no_grad():
            model.embeddings.weight /= model.embeddings.weight.square().mean().sqrt()
    ours = to_hugging_face(model).train()
    ids = periodic(4, 16, VOCABULARY)
    routed = []
    for block in model.blocks.values():
        block.router.register_forward_hook(lambda module, args, output: routed.append(output))
    theirs = model(ids)
    next_token_loss(theirs, ids).backward()
    metrics = model.compute_auxiliary_metrics(reset=False)

    with capture(ours) as captured:
        logits = ours(ids).logits
    balance = load_balancing_loss(captured.logits(), captured.indices(), variant="olmoe")
    z = router_z_loss(captured.logits())
    loss = next_token_loss(logits, ids)
    (loss + WEIGHTS["lb_loss_weight"] * balance + WEIGHTS["z_loss_weight"] * z).backward()
    wide = backward_in_float64(ours, ids, WEIGHTS["lb_loss_weight"], WEIGHTS["z_loss_weight"])

    assert_close(theirs, logits, "logits")
    for (weights, indices, *_), own in zip(routed, captured.outputs.values(), strict=True):
        assert torch.equal(indices.flatten(0, 1), own[0].indices)
        assert_close(weights.flatten(0, 1), own[0].weights, "weights")
    largest = max(layer.abs().max().item() for layer in captured.logits())
    for name, value, scale in (
        ("load balancing loss", balance, 1.0),
        ("router Z loss", z, max(1.0, largest) ** 2),  # a mixture's is 0: its logits are log p
    ):
        assert_close(metrics[f"{name} unscaled"][0] / LAYERS, value, name, scale=scale)
    gradients = [{name: p.grad for name, p in m.named_parameters()} for m in (ours, wide, model)]
    mine, exact, theirs = (OlmoeTensors("", g) for g in gradients)
    check_gradients(
        _pairs(model, mine, theirs), _pairs(model, exact, OlmoeTensors("", gradients[2]))
    )
