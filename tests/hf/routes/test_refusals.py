"""Routes that do not fit are refused in one line before the forward."""

import dataclasses
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

from l2r import Router, Routes, build_router, record, replay
from l2r.hf.models import CACHE
from l2r.hf.routes.layers import fingerprint_of
from l2r.routers import L2RConfig
from l2r.routers.selection_rule import Selection
from tests.hf.routes.models import drawn_for, family_model, token_ids


class Words:
    """A tokenizer by its vocabulary."""

    def __init__(self, *words):
        self.words = words

    def get_vocab(self):
        return {word: number for number, word in enumerate(self.words)}


@pytest.fixture(scope="module")
def model():
    return family_model("olmoe")


@pytest.fixture(scope="module")
def forwards(model):
    """Calls of the first layer, which a refusal must come before."""
    calls = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


OTHERS = {
    "num_experts": {"num_experts": 16},
    "top_k": {"top_k": 3},
    "layers": {"layers": (1,)},
    "hidden_layers": {"hidden_layers": 3},
    "model_type": {"model_type": "mixtral"},
    "tokenizer": {"tokenizer": "0123"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_routes_of_another_model_are_refused(model, name):
    of = dataclasses.replace(fingerprint_of(model), **OTHERS[name])
    shape = (2, len(of.layers), of.top_k)
    experts = np.broadcast_to(np.arange(of.top_k), shape)
    with (
        pytest.raises(ValueError, match=f"routes and model must have the same {name}; got"),
        replay(model, Routes(experts, of, [2]), tokenizer=Words("a", "b")),
    ):
        pass


def test_a_tokenizer_is_compared_where_both_name_one(model):
    ids = token_ids()
    with record(model, tokenizer=Words("a", "b")) as recorder:
        model(ids)
    routes = recorder.routes()
    with replay(model, routes), torch.no_grad():
        model(ids)
    with (
        pytest.raises(ValueError, match="must have the same tokenizer"),
        replay(model, routes, tokenizer=Words("b", "a")),
    ):
        pass


MASK = torch.tensor([[1] * 5 + [0] * 7, [1] * 12])
CALLS = {
    "a sequence too long": ((12, 11), {}, "from number 0 on they have .12, 11. tokens"),
    "a sequence too short": ((12, 13), {}, "must fill the rows of a call without padding, 2 of 12"),
    "one too few": ((12,), {}, r"2 of 12 tokens; from number 0 on they have \[12\] tokens"),
    "a masked one too long": ((6, 12), {"attention_mask": MASK}, "0 has 5 in the call and 6 in"),
    "masked, one too few": ((5,), {"attention_mask": MASK}, "a call reads 2 sequences; 1 of the"),
    "another mask": ((5, 9), {"attention_mask": MASK[:, :9]}, "must be .2, 12., as the inputs"),
    "a mask by pairs": ((5, 12), {"attention_mask": MASK[:, None, None]}, "be .rows, columns."),
}


@pytest.mark.parametrize(("counts", "options", "message"), CALLS.values(), ids=CALLS)
def test_a_call_with_other_tokens_is_refused(model, forwards, counts, options, message):
    forwards.clear()
    with pytest.raises(ValueError, match=message) as error, replay(model, drawn_for(model, counts)):
        model(token_ids(), use_cache=False, **options)
    assert not forwards
    assert "\n" not in str(error.value)


@torch.no_grad()
def test_sequences_are_read_once(model):
    routes = drawn_for(model, (12, 12, 12))
    with replay(model, routes) as session:
        model(token_ids(), use_cache=False)
        assert session.remaining == 1
        with pytest.raises(ValueError, match=r"from number 2 on they have \[12\] tokens"):
            model(token_ids(), use_cache=False)
        model(token_ids(rows=1), use_cache=False)
        with pytest.raises(ValueError, match=r"from number 3 on they have \[\] tokens"):
            model(token_ids(rows=1), use_cache=False)


@torch.no_grad()
def test_a_cache_that_another_call_filled_is_refused(model):
    ids = token_ids()
    cache = model(ids[:, :6], use_cache=True)[CACHE]
    message = "a cache of 6 tokens of 2 rows that the call before it did not fill"
    with pytest.raises(ValueError, match=message), replay(model, drawn_for(model, (12, 12))):
        model(ids[:, 6:], **{CACHE: cache})
    with pytest.raises(ValueError, match=message), record(model):
        model(ids[:, 6:], **{CACHE: cache})


@torch.no_grad()
def test_a_mask_that_fits_neither_the_new_tokens_nor_all_is_refused(model):
    ids = token_ids()
    with (
        pytest.raises(ValueError, match="must have 8 columns, 6 of the cache and 2 new; got 7"),
        replay(model, drawn_for(model, (12, 12))),
    ):
        cache = model(ids[:, :6], use_cache=True)[CACHE]
        mask = torch.ones(2, 7, dtype=torch.long)
        mask[0, 0] = 0
        model(ids[:, 6:8], **{CACHE: cache}, attention_mask=mask)


@torch.no_grad()
def test_a_model_that_was_not_called_is_named(model):
    with (
        pytest.raises(ValueError, match="must see a call of the model that it got; it saw none"),
        replay(model, drawn_for(model, (12, 12))),
    ):
        pass
    with (
        pytest.raises(ValueError, match="it saw none that succeeded"),
        replay(model, drawn_for(model, (12, 12))),
        suppress(IndexError),
    ):
        model(token_ids() + 10**6, use_cache=False)
    for block in (replay(model, drawn_for(model, (12, 12))), record(model)):
        with pytest.raises(ValueError, match="the router of layer 0 ran outside of a call"), block:
            model.model(token_ids())


def test_a_model_without_routers_is_refused():
    with (
        pytest.raises(ValueError, match="has no router of a supported family"),
        record(nn.Linear(2, 2)),
    ):
        pass


def test_two_routers_in_one_layer_are_refused():
    def router():
        return build_router(L2RConfig(rank=2), hidden_size=8, num_experts=4, top_k=2)

    both = nn.ModuleDict(
        {"encoder": nn.ModuleList([router()]), "decoder": nn.ModuleList([router()])}
    )
    with pytest.raises(ValueError, match=r"encoder\.0 and decoder\.0 are both in layer 0"):
        fingerprint_of(both)


def test_layers_of_different_sizes_are_refused():
    routers = [
        build_router(L2RConfig(rank=2), hidden_size=8, num_experts=n, top_k=2) for n in (4, 6)
    ]
    stack = nn.Sequential(*(nn.Sequential(router) for router in routers))
    with pytest.raises(ValueError, match="must have as many experts and choose as many"):
        fingerprint_of(stack)


def test_a_selection_that_cannot_weigh_is_refused():
    class Own(Selection):
        def __call__(self, router, logits, bias=None):
            raise NotImplementedError  # refused before it is called

    router = build_router(L2RConfig(rank=2), hidden_size=8, num_experts=4, top_k=2)
    assert isinstance(router, Router)
    router.selection = Own()
    with (
        pytest.raises(ValueError, match="Own must define weigh"),
        replay(router, drawn_for(router, (3,))),
    ):
        pass


@torch.no_grad()
def test_inputs_that_a_router_does_not_see_are_named():
    """A block that leaves tokens out has no one router input per token."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = build_router(L2RConfig(rank=2), hidden_size=8, num_experts=4, top_k=2)

        def forward(self, x):
            return self.router(x[::2])

    half = Half()
    with pytest.raises(ValueError, match="the model; it got 6 and they saw 3"), record(half):
        half(torch.randn(6, 8))
    with (
        pytest.raises(ValueError, match="must see the 6 inputs of the model; it saw 3"),
        replay(half, drawn_for(half, (6,))),
    ):
        half(torch.randn(6, 8))


@torch.no_grad()
def test_a_router_that_runs_twice_or_never_is_not_recorded():
    class Odd(nn.Module):
        def __init__(self, times):
            super().__init__()
            self.router = build_router(L2RConfig(rank=2), hidden_size=8, num_experts=4, top_k=2)
            self.times = times

        def forward(self, x):
            for _ in range(self.times):
                self.router(x)

    for times, message in ((2, "layer 0 was called twice"), (0, "router. was not called")):
        odd = Odd(times)
        with pytest.raises(ValueError, match=message), record(odd):
            odd(torch.randn(6, 8))


def test_nothing_recorded_is_no_routes(model):
    with record(model) as recorder, pytest.raises(ValueError, match="nothing was recorded yet"):
        recorder.routes()
    with (
        pytest.raises(ValueError, match="a call must have a tensor to be replayed; got none"),
        record(model),
    ):
        model()
