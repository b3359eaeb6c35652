"""Routers with a fused selection replay in the call that makes the logits; opening is one walk."""

import numpy as np
import pytest
import torch
from torch import nn

from l2r import record, replay
from l2r.hf.routes import NO_ROUTE
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import modules_by_path
from l2r.kernels import cpu, dispatch
from l2r.routers.selection_rule import Selection
from tests.hf.routes.models import drawn_for, family_model, own_model, token_ids

MODELS = {
    "ours, L2R": lambda: own_model(kind="l2r_sips", heads=2),
    "ours, linear": own_model,
    "olmoe, swapped": lambda: family_model("olmoe", swapped=True),
    "mixtral, swapped": lambda: family_model("mixtral", swapped=True),
}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_given_experts_are_weighed_in_the_routers_own_call(name, trained, monkeypatch):
    model, ids = MODELS[name](), token_ids()
    routes = drawn_for(model, (12, 12)).truncated(10).extended(2)  # two tokens choose
    passed = []
    fused, infer = dispatch._fused, cpu.infer

    def noted(given, *rest):
        passed.append(given.routes)
        return fused(given, *rest)

    def inferred(*call):
        found = infer(*call)
        if found is not None:
            passed.append(call[-1])
        return found

    def weigh(*_):
        pytest.fail("the experts were weighed apart from the logits")

    monkeypatch.setattr(dispatch, "_fused", noted)
    monkeypatch.setattr(cpu, "infer", inferred)
    monkeypatch.setattr(Selection, "weigh", weigh)
    monkeypatch.setattr(Selection, "__call__", weigh)
    with torch.set_grad_enabled(trained), replay(model, routes), record(model) as recorder:
        model(ids, use_cache=False)
    calls = [given for given in passed if given is not None]
    assert len(calls) == len(routes.layers)
    for layer, given in enumerate(calls):
        rows = given.view(2, 12, -1)
        assert (rows[:, 10:] == NO_ROUTE).all()
        assert np.array_equal(rows[:, :10].flatten(0, 1), routes.experts[:, layer])
    taken = recorder.routes().truncated(10)
    assert np.array_equal(taken.experts, routes.experts)


def test_another_selection_is_weighed_by_its_own_rule(monkeypatch):
    model = family_model("deepseek_v3", swapped=True)
    weighed = []
    weigh = Selection.weigh
    monkeypatch.setattr(
        Selection, "weigh", lambda self, *rest: weighed.append(self) or weigh(self, *rest)
    )
    routes = drawn_for(model, (12, 12))
    with replay(model, routes):
        model(token_ids(), use_cache=False)
    assert len(weighed) == len(routes.layers)


@pytest.mark.parametrize("name", [*FAMILIES][:4])
def test_modules_come_by_the_paths_of_torch(name):
    model = family_model(name)
    assert [*modules_by_path(model)] == [*model.named_modules()]


def test_a_module_in_two_places_or_in_itself_comes_once():
    shared = nn.Linear(1, 1)
    tree = nn.ModuleDict({"a": nn.Sequential(shared, nn.Identity()), "b": shared})
    tree["b"].register_module("up", tree["a"])
    tree["a"].register_module("none", None)
    assert [*modules_by_path(tree)] == [*tree.named_modules()]
