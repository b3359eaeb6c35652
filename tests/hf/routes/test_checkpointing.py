"""Layers that the backward pass recomputes take the experts of their own forward."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from l2r import capture, record, replay
from l2r.hf.swap.families import FAMILIES
from tests.hf.routes.models import drawn_for, family_model, token_ids
from tests.tiers import few_families

BATCHES = 3


def setup(name, swapped):
    """A model in training, without dropout, with micro-batches of one shape and their routes.

    Routes are drawn, so that a layer that chose for itself would have other gradients.
    """
    model = family_model(name, swapped).train()
    if name == "phimoe":
        model.eval()  # in training it samples
    batches = [token_ids(rows=1, seed=seed) for seed in range(BATCHES)]
    return model, batches, drawn_for(model, (12,) * BATCHES)


def enable(model, *, reentrant):
    """transformers' own switch, under its newer name or its older."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    switch = next(getattr(model, name) for name in names if hasattr(model, name))
    switch({"use_reentrant": reentrant})


def loss_of(model, ids):
    return model(ids, use_cache=False).logits.logsumexp(-1).sum()


def gradients_of(model):
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def expected_gradients(model, batches, routes):
    """Of all micro-batches together, nothing recomputed."""
    with replay(model, routes):
        sum(loss_of(model, ids) for ids in batches).backward()
    return gradients_of(model)


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        bound = 64 * torch.finfo(torch.float32).eps * max(1e-3, theirs[name].abs().max().item())
        torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=bound)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-hooks", "reentrant"])
@pytest.mark.parametrize("name", few_families(name for name in FAMILIES if name != "phimoe"))
def test_micro_batches_in_flight_are_recomputed_with_their_own_routes(name, reentrant):
    if name == "mistral_large4" and reentrant:
        pytest.skip("transformers' own backward fails: its layers share a graph of their positions")
    model, batches, routes = setup(name, swapped=False)
    expected = expected_gradients(model, batches, routes)
    own = [loss_of(model, ids) for ids in batches]
    sum(own).backward()
    assert any(not torch.equal(g, expected[n]) for n, g in gradients_of(model).items())
    enable(model, reentrant=reentrant)
    with replay(model, routes):
        losses = [loss_of(model, ids) for ids in batches]
    sum(losses).backward()  # after the block, the last micro-batch first
    assert_close(gradients_of(model), expected)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-hooks", "reentrant"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
def test_backward_may_run_in_any_order_inside_the_block_and_after(reentrant, order, inside):
    model, batches, routes = setup("qwen3_moe", swapped=True)
    expected = expected_gradients(model, batches, routes)
    enable(model, reentrant=reentrant)
    with replay(model, routes):
        losses = [loss_of(model, ids) for ids in batches]
        for number in order if inside else ():
            losses[number].backward()
    for number in () if inside else order:
        losses[number].backward()
    assert_close(gradients_of(model), expected)
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_older_block_is_recomputed_inside_a_newer_one():
    model, batches, routes = setup("olmoe", swapped=False)
    expected = expected_gradients(model, batches[:2], routes[:2])
    enable(model, reentrant=False)
    with replay(model, routes[0]):
        first = loss_of(model, batches[0])
    with replay(model, routes[1]):
        first.backward()
        second = loss_of(model, batches[1])
    with record(model) as recorder:
        second.backward()
        with torch.no_grad():
            model(batches[2], use_cache=False)
    assert_close(gradients_of(model), expected)
    assert len(recorder.routes()) == 1


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-hooks", "reentrant"])
def test_recomputed_layers_are_not_recorded_again(reentrant):
    model, batches, _ = setup("olmoe", swapped=True)
    with record(model) as plain:
        for ids in batches:
            loss_of(model, ids)
    enable(model, reentrant=reentrant)
    with record(model) as recorder:
        for ids in batches:
            loss_of(model, ids).backward()
    assert recorder.routes() == plain.routes()


def wrap_layers(model):
    """As FSDP's and torchtitan's training loops do."""
    layers = model.model.layers
    for number, layer in enumerate(layers):
        layers[number] = checkpoint_wrapper(layer)


def call_checkpoint(model, *, reentrant):
    """As a training loop of one's own may do."""
    for layer in model.model.layers:
        forward = layer.mlp.forward
        layer.mlp.forward = lambda x, forward=forward: checkpoint(
            forward, x, use_reentrant=reentrant
        )


def test_wrapped_layers_are_recomputed_with_their_own_routes():
    model, batches, routes = setup("olmoe", swapped=False)
    expected = expected_gradients(model, batches, routes)
    wrap_layers(model)
    with replay(model, routes):
        losses = [loss_of(model, ids) for ids in batches]
    sum(losses).backward()
    ours = {n.replace("_checkpoint_wrapped_module.", ""): g for n, g in gradients_of(model).items()}
    assert_close(ours, expected)


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved-hooks", "reentrant"])
@pytest.mark.parametrize("together", [True, False])
def test_a_checkpoint_that_is_called_directly_finds_its_routes_inside_the_block(
    reentrant, together
):
    model, batches, routes = setup("olmoe", swapped=False)
    expected = expected_gradients(model, batches, routes)
    call_checkpoint(model, reentrant=reentrant)
    with replay(model, routes):
        losses = [loss_of(model, ids) for ids in batches]
        if together:
            sum(losses).backward()
        else:
            for number in (1, 0, 2):
                losses[number].backward()
    assert_close(gradients_of(model), expected)


@pytest.mark.parametrize("direct", [False, True], ids=["transformers", "direct"])
@pytest.mark.parametrize("later", [False, True])
def test_a_forward_from_before_the_block_is_recomputed_as_it_was(direct, later):
    model, batches, routes = setup("olmoe", swapped=False)
    loss_of(model, batches[0]).backward()
    expected = gradients_of(model)
    if direct:
        call_checkpoint(model, reentrant=False)
    else:
        enable(model, reentrant=False)
    loss = loss_of(model, batches[0])
    with replay(model, routes):
        if later:
            loss_of(model, batches[1])
        loss.backward()
        if not later:
            loss_of(model, batches[1])
    assert_close(gradients_of(model), expected)


def test_routers_are_captured_inside_a_replay():
    """Replay puts its own function around the checkpointing one, whose kind stays known."""
    model, batches, routes = setup("mixtral", False)
    enable(model, reentrant=False)
    with replay(model, routes), capture(model) as captured:
        for ids in batches:
            loss_of(model, ids).backward()
    assert all(len(calls) == BATCHES for calls in captured.outputs.values())
    enable(model, reentrant=True)
    with replay(model, routes):
        with pytest.raises(ValueError, match="'use_reentrant': False"), capture(model):
            pass
        loss_of(model, torch.cat(batches))
