"""The code that the recorders of all engines share, tested on a model without an engine."""

import pytest
import torch
from torch import nn

from l2r.engines.routes import WHOLE_ROWS, RouterHook, recording, replaying
from l2r.hf.routes import Fingerprint

SIZES = Fingerprint(num_experts=4, top_k=2, layers=(0, 1), hidden_layers=2)


class Chooser(nn.Module):
    """Takes the experts that a token's number names."""

    def choose(self, ids):
        return torch.stack([ids % 4, (ids + 1) % 4], dim=-1)

    def hook(self):
        own = self.choose
        return RouterHook(self, "choose", lambda choose: lambda ids: choose(own(ids), WHOLE_ROWS))


class Model(nn.Module):
    """Two layers; a call may fail after as many of them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Chooser(), Chooser()])

    def forward(self, ids, fails_after=None):
        for number, layer in enumerate(self.layers):
            if number == fails_after:
                raise MemoryError
            layer.choose(ids)
        if fails_after is not None:
            raise MemoryError


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_call_that_failed_is_not_recorded(layers):
    """As in ``l2r.hf.routes``: the call that is made in its place has the routes."""
    model, ids = Model(), torch.arange(6).view(2, 3)
    with recording(model, {n: m.hook() for n, m in enumerate(model.layers)}, SIZES) as recorder:
        with pytest.raises(MemoryError):
            model(ids, fails_after=layers)
        for row in ids:
            model(row[None])
    routes = recorder.routes()
    assert routes.lengths.tolist() == [3, 3]
    assert routes.experts[:, 0].tolist() == Chooser().choose(ids.flatten()).tolist()
    assert not model._forward_hooks and not model._forward_pre_hooks


class Packed(Model):
    """Takes what the models of the engines take."""

    def forward(self, ids, positions=None, **told):
        super().forward(ids)


STARTS_AGAIN, PADDED = torch.tensor([[0, 1, 0, 1, 2, 3]]), torch.tensor([[0, 0, 0, 1, 2, 3]])


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((STARTS_AGAIN,), {}),
        ((), {"positions": STARTS_AGAIN}),
        ((), {"position_ids": STARTS_AGAIN}),
        ((), {"doc_lens": torch.tensor([[2, 4]])}),
        ((), {"packed_seq_params": object()}),
    ],
)
def test_rows_of_several_documents_are_refused_and_padding_is_none(args, told):
    """Their routes are sequences, which a row would give to its first tokens alone."""
    model, ids = Packed(), torch.arange(6)[None]
    router_hooks = {n: m.hook() for n, m in enumerate(model.layers)}
    with recording(model, router_hooks, SIZES) as recorder:
        with pytest.raises(ValueError, match="each row of a call must be one sequence"):
            model(ids, *args, **told)
        model(ids, PADDED, labels=STARTS_AGAIN, doc_lens=None)
    assert recorder.routes().lengths.tolist() == [6]


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_call_that_failed_leaves_its_routes_to_the_next(layers):
    model, ids = Model(), torch.arange(6).view(2, 3)

    def router_hooks():
        return {n: m.hook() for n, m in enumerate(model.layers)}

    with recording(model, router_hooks(), SIZES) as recorder:
        model(ids)
    routes = recorder.routes()
    with (
        replaying(model, router_hooks(), SIZES, routes, "right"),
        recording(model, router_hooks(), SIZES) as again,
    ):
        for row in ids + 1:
            with pytest.raises(MemoryError):
                model(row[None], fails_after=layers)
            model(row[None])
    assert again.routes() == routes
