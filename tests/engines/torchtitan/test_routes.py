"""Routes of torchtitan's routers: recorded, replayed with its own rule, on two ranks."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from l2r.hf.routes import Fingerprint
from tests.engines.engines import SIPS, assert_close
from tests.hf.routes.made import drawn
from tests.processes import on_two_ranks

from .models import EXPERTS, TOP_K, X, built, configuration
from .test_ranks import dimensions, grouped, local, shard

from torchtitan.models.common.moe import GroupedExperts  # isort: skip

from l2r.engines.torchtitan.routes import record, replay  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype")
SIZES = Fingerprint(num_experts=EXPERTS, top_k=TOP_K, layers=(0,), hidden_layers=1)
ROUTES = drawn([8, 8], SIZES, 3)


@pytest.fixture(autouse=True)
def _in_fp32(monkeypatch):
    monkeypatch.setattr(GroupedExperts, "_grouped_mm", grouped)


def by_hand(router, x, chosen):
    """Weights of given experts by torchtitan's rule, from the logits of the gate."""
    weights = router.gate(x).softmax(-1).gather(-1, chosen)
    if router.route_norm:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * router.route_scale


@pytest.mark.parametrize("rule", [{}, {"route_norm": True, "route_scale": 2.5}])
def test_weights_and_gradients_are_those_of_its_rule(rule):
    layer = built(SIPS, **rule)
    chosen = ROUTES.padded()[0][:, :, 0]
    with replay(layer, ROUTES), record(layer) as recorder:
        seen = []
        hook = layer.router.register_forward_hook(lambda *call: seen.append(call[2]))
        out = layer(X)
        hook.remove()
    weights, experts, _ = seen[0]
    assert torch.equal(experts, chosen) and recorder.routes() == ROUTES
    assert not torch.equal(out, layer(X))
    weights.square().sum().backward()
    found = {n: p.grad.clone() for n, p in layer.router.named_parameters()}
    layer.zero_grad()
    expected = by_hand(layer.router, X, chosen)
    expected.square().sum().backward()
    assert_close(weights, expected.detach(), "weights")
    for name, p in layer.router.named_parameters():
        assert p.grad.abs().max() > 0
        assert_close(found[name], p.grad, name)


def test_its_own_routes_change_no_bit_and_others_do_for_some_tokens():
    layer = built(SIPS)
    with torch.no_grad():
        with record(layer) as recorder:
            plain = layer(X)
        own = recorder.routes()
        assert own.fingerprint == SIZES
        with replay(layer, own):
            assert torch.equal(layer(X), plain)
        cut = ROUTES.truncated(5).extended(3)
        with replay(layer, cut), record(layer) as recorder:
            layer(X)
        taken = recorder.routes().padded()[0]
        assert torch.equal(taken[:, :5], ROUTES.padded()[0][:, :5])
        assert torch.equal(taken[:, 5:], own.padded()[0][:, 5:])
        assert torch.equal(layer(X), plain) and "forward" not in vars(layer.router)


def test_recomputed_layers_take_the_routes_of_their_own_call():
    """Two micro-batches in flight; the last is computed again first."""

    class Wrapped(torch.nn.Module):
        def __init__(self, again):
            super().__init__()
            self.layer, self.again = built(SIPS), again

        def forward(self, x):
            if self.again:
                return checkpoint(self.layer, x, use_reentrant=False)
            return self.layer(x)

    found = []
    for again in (False, True):
        model = Wrapped(again)
        with replay(model, ROUTES):
            outs = [model(half) for half in X.chunk(2)]
            sum(n * out.square().sum() for n, out in enumerate(outs, 1)).backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
    for name, value in found[0].items():
        assert_close(found[1][name], value, name)


def test_what_does_not_fit_is_refused():
    layer = built(SIPS)
    few = "a call reads 2 sequences; 1 of"
    with pytest.raises(ValueError, match=few), replay(layer, ROUTES[:1]):
        layer(X)
    other = drawn([8, 8], Fingerprint(num_experts=EXPERTS, top_k=TOP_K, layers=(1,)), 3)
    with pytest.raises(ValueError, match="routes must have the layers"), replay(layer, other):
        pass


def both(rank, start):
    """The layer at TP 2 and EP 2, whose router sees half of every sequence."""
    GroupedExperts._grouped_mm = grouped
    dims = dimensions(ep=2, tp=2)
    layer = configuration(SIPS, shard=partial(shard, ep=True)).build()
    layer.load_state_dict(start)
    layer.parallelize(dims)
    model = Whole(layer, rank)
    with record(model) as recorder:
        model(X)
    own = recorder.routes()
    with replay(model, ROUTES), record(model) as recorder:
        out = local(model(X))
    return own, recorder.routes(), out.detach()


class Whole(torch.nn.Module):
    """A model around a layer: its calls have whole sequences, which are cut inside."""

    def __init__(self, layer, rank):
        super().__init__()
        self.layer, self.rank = layer, rank

    def forward(self, x):
        return self.layer(x.chunk(2, dim=1)[self.rank].contiguous())


@pytest.mark.engine("torchtitan", "routes")
def test_two_ranks_record_and_replay_whole_sequences(tmp_path):
    layer = built(SIPS)
    start = {name: value.clone() for name, value in layer.state_dict().items()}
    with record(layer) as recorder, torch.no_grad():
        layer(X)
    with replay(layer, ROUTES), torch.no_grad():
        expected = layer(X)
    ranks = on_two_ranks(both, tmp_path, start)
    for rank, (own, taken, out) in enumerate(ranks):
        assert own == recorder.routes() and taken == ROUTES
        assert_close(out, expected.chunk(2, dim=1)[rank], "outputs of a rank", room=1e-5)


def test_a_stage_of_a_pipeline_has_the_numbers_of_the_whole_model():
    """It has some of the layers that its configuration has."""
    stage = torch.nn.Module()
    stage.layers = torch.nn.ModuleDict({"1": built(SIPS)})
    stage.config = SimpleNamespace(layers=[None, None])
    stage.forward = stage.layers["1"].__call__
    with record(stage) as recorder, torch.no_grad():
        stage(X)
    fingerprint = recorder.routes().fingerprint
    assert (fingerprint.layers, fingerprint.hidden_layers) == ((1,), 2)
