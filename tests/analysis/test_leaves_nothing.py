"""What reads a model leaves it as it was, also where the model fails in the middle."""

import pytest
import torch

from l2r import L2RConfig, capture, record, replay
from l2r.analysis.diagnostics import (
    DiagnosisSettings,
    RouterWatch,
    collect_records,
    diagnose_layers,
    measure_routing_gain,
)
from l2r.analysis.diagnostics.checks import check_model
from l2r.analysis.routes import compare_models, compare_routes, in_other_arithmetic
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.swap import replace_routers
from l2r.training.evaluation import token_losses
from tests.hf.families import sample_tokens, tiny_model
from tests.training.test_fit import state_of

IDS = sample_tokens()


def routes_of(model):
    with torch.no_grad(), record(model) as recorder:
        model(input_ids=IDS)
    return recorder.routes()


def diagnose(model):
    diagnose_layers(
        collect_records(model, [{"input_ids": IDS}]), settings=DiagnosisSettings(certify=1)
    )


def gain(model):
    measure_routing_gain(
        model, [{"input_ids": IDS}], lambda m, b: token_losses(m, b["input_ids"]).mean()
    )


def inside(block):
    def call(model):
        with block(model):
            model(input_ids=IDS, labels=IDS).loss.backward()
        model.zero_grad()

    return call


def watch(model):
    watching = RouterWatch(model)
    watching.start()
    try:
        model(input_ids=IDS)
    finally:
        watching.stop()


CALLS = {
    "check": lambda model: check_model(model, {"input_ids": IDS}, balance=0.1),
    "diagnose": diagnose,
    "routing gain": gain,
    "another arithmetic": lambda model: in_other_arithmetic(model, "bf16"),
    "comparison": lambda model: compare_models(model, model, [IDS]),
    "comparison with routes": lambda model: compare_routes(model, ROUTES[0], list(IDS)),
    "capture": inside(capture),
    "record": inside(record),
    "replay": inside(lambda model: replay(model, ROUTES[0])),
    "watch": watch,
}
ROUTES = []


@pytest.fixture(scope="module")
def swapped():
    model = replace_routers(tiny_model(FAMILIES["mixtral"]), L2RConfig(rank=2, heads=2))
    # transformers keeps on the instance that it has set up the capture of router logits
    model(input_ids=IDS, labels=IDS, output_router_logits=True)
    ROUTES[:] = [routes_of(model)]
    return model


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_model_is_left_as_it_was(swapped, name, fails):
    """Gradients, modes, hooks, functions on instances, dtypes, what trains, and the weights."""
    model = swapped.train()
    model.model.layers[0].eval()
    model.lm_head.requires_grad_(False)
    hooks = []
    if fails:

        def stop(*_):
            raise KeyboardInterrupt

        hooks.append(model.model.layers[1].mlp.experts.register_forward_pre_hook(stop))
    before, weights = state_of(model), {k: v.clone() for k, v in model.state_dict().items()}
    try:
        CALLS[name](model)
        assert not fails or name == "another arithmetic"
    except KeyboardInterrupt:
        assert fails
    assert state_of(model) == before
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    for hook in hooks:
        hook.remove()
