"""A layer that runs again takes the experts of its forward, whatever it would choose by then."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch.utils.checkpoint import CheckpointError, checkpoint

from l2r import pin_routes
from l2r.hf.models.version_names import checkpoint_activations
from l2r.hf.routes.pinning import _Pins
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import running_sites
from l2r.routers import capture
from tests.hf.families import each_rule_and_dtype
from tests.hf.routes.models import family_model, given_experts, token_ids

NOISE = 0.5  # of a router's inputs, which norms bring to a mean square of one


class Noise:
    """Adds to what routers read: other noise in each call, which no random state brings back."""

    def __init__(self, model, size=NOISE):
        self.generator = torch.Generator().manual_seed(5)
        self.hooks = [s.router.register_forward_pre_hook(self) for s in running_sites(model)]
        self.size = size

    def __call__(self, module, args):
        x, *rest = args
        noise = torch.randn(x.shape, generator=self.generator, dtype=torch.float32)
        return (x + (self.size * noise).to(x), *rest)


def loss_of(model, ids):
    return model(ids, use_cache=False).logits.float().logsumexp(-1).sum()


@each_rule_and_dtype(name for name in FAMILIES if "inkling2" not in name)
def test_experts_of_the_recomputation_are_those_of_the_forward(name, dtype):
    """Every family: what the experts get, forward and again, in a model whose routers see noise."""
    model = family_model(name).to(dtype).train()
    if name == "mistral_large4":
        pytest.skip("transformers' own checkpointing fails: its layers share a graph")
    checkpoint_activations(model)
    Noise(model)
    ids = token_ids()
    with pin_routes(model), given_experts(model) as got:
        loss = loss_of(model, ids)
        forward = len(got)
        loss.backward()
    again = got[forward:]
    assert len(again) == forward
    for one, other in zip(got[:forward], reversed(again), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_without_pins_the_same_model_takes_other_experts(name):
    model = family_model(name).train()
    checkpoint_activations(model)
    Noise(model)
    with given_experts(model) as got:
        loss = loss_of(model, token_ids())
        forward = len(got)
        with contextlib.suppress(CheckpointError):  # the experts have other numbers of tokens
            loss.backward()
    pairs = zip(got[:forward], reversed(got[forward:]), strict=False)
    assert any(not torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("kind", ["stock", "swapped"])
@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3", "gpt_oss", "lfm2_moe"])
def test_pins_change_neither_outputs_nor_gradients_where_nothing_flips(name, kind):
    model = family_model(name, kind == "swapped").train()
    plain = copy.deepcopy(model)
    checkpoint_activations(model)
    with pin_routes(model):
        losses = [loss_of(model, token_ids(seed=seed)) for seed in (1, 2, 3)]
        sum(losses).backward()  # three micro-batches in flight
    theirs = [loss_of(plain, token_ids(seed=seed)) for seed in (1, 2, 3)]
    sum(theirs).backward()
    assert [float(x.detach()) for x in losses] == [float(x.detach()) for x in theirs]
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        if other.grad is not None:
            near = 64 * torch.finfo(torch.float32).eps * max(1e-3, float(other.grad.abs().max()))
            torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=near)
    assert not any("forward" in vars(site.router) for site in running_sites(model))


def test_rounding_that_the_recomputation_lacks_flips_no_token():
    """A checkpoint of one's own, whose input is rounded to bfloat16 in the forward alone."""
    model = family_model("qwen3_moe").train()
    block, runs = model.model.layers[0].mlp, []
    x = torch.randn(8, 512, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    rounding = (x.bfloat16().float() - x).detach()

    def run(x):
        runs.append(True)
        return block(x + float(len(runs) == 1) * rounding)

    for pinned in (False, True):
        runs.clear()
        pins = pin_routes(model) if pinned else None
        with capture(block) as first, given_experts(block) as got:
            out = checkpoint(run, x, use_reentrant=False)
            with contextlib.suppress(CheckpointError):
                out.sum().backward()
        assert len(first.indices()) == 1 and len(got) == 2
        assert torch.equal(got[0], got[1]) == pinned
        if pins:
            pins.stop()


def test_pins_live_as_long_as_their_graphs():
    site = running_sites(family_model("olmoe"))[0]
    pins = _Pins(site)
    x = torch.ones(3, 2, requires_grad=True)
    logits = x * 2
    pins.keep(torch.zeros(3, 1), logits, 0)
    assert pins._alive[0]() is not None
    del logits
    gc.collect()
    assert pins._alive[0]() is None


def test_pins_that_nobody_keeps_hold_as_long_as_the_model():
    model = family_model("mixtral").train()
    checkpoint_activations(model)
    Noise(model)
    pin_routes(model)
    gc.collect()
    with given_experts(model) as got:
        loss = loss_of(model, token_ids())
        forward = len(got)
        loss.backward()
    again = reversed(got[forward:])
    assert all(torch.equal(a, b) for a, b in zip(got[:forward], again, strict=True))
    gone = weakref.ref(model)
    del model, loss
    gc.collect()
    assert gone() is None


def test_reentrant_checkpointing_and_forwards_from_before_are_refused():
    model = family_model("olmoe").train()
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    switch = next(getattr(model, n) for n in names if hasattr(model, n))
    switch({"use_reentrant": True})
    with pytest.raises(ValueError, match="'use_reentrant': False"):
        pin_routes(model)
    switch({"use_reentrant": False})
    loss = loss_of(model, token_ids())
    with pin_routes(model), pytest.raises(ValueError, match="were not pinned"):
        loss.backward()


def test_evaluation_and_generation_are_as_without_pins():
    model = family_model("mixtral")
    ids = token_ids()
    with torch.no_grad():
        plain = model(ids).logits
        with pin_routes(model):
            assert torch.equal(model(ids).logits, plain)
