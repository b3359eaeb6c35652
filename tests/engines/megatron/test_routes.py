"""Routes through Megatron-core's own RouterReplay: recorded, replayed, recomputed, on two ranks."""

import pytest
import torch

from l2r import record as record_ours
from l2r import replay as replay_ours
from l2r.hf.routes import to_megatron
from tests.engines.engines import SIPS, assert_close, periodic
from tests.hf.routes.made import drawn
from tests.processes import on_two_ranks

from .models import EXPERTS, LAYERS, TOP_K, VOCABULARY, forward, on_cpu, one_rank, small
from .test_ranks import PARALLEL, Norm, own_name

from megatron.core import parallel_state  # isort: skip
from megatron.core.transformer.moe.router_replay import RouterReplay  # isort: skip

from l2r.engines.megatron.checkpoint import to_hugging_face  # isort: skip
from l2r.engines.megatron.routes import record, replay  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore")
IDS = periodic(4, 16, VOCABULARY)
# Losses of routers count what was chosen, not what was taken; without them gradients are ours.
REPLAYS = {"moe_enable_routing_replay": True, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": None}


def build(**changes):
    return small(SIPS, **REPLAYS | changes)


def of_four(model, seed=0, lengths=None):
    """Drawn routes of four sequences of 16 tokens."""
    with record(model) as recorder, torch.no_grad():
        forward(model, IDS)
    return drawn([16] * 4, recorder.fingerprint, seed, **({"lengths": lengths} if lengths else {}))


def backward(model, ids):
    """Sum of squares of the logits, and gradients by name."""
    loss = forward(model, ids).square().mean()
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory):
    with one_rank(tmp_path_factory.mktemp("megatron")):
        yield


def test_records_what_our_model_records_and_replays_it_as_ours_does():
    model = build().eval()
    ours = to_hugging_face(model).eval()
    with record(model) as recorder, torch.no_grad():
        logits = forward(model, IDS)
    with record_ours(ours) as expected, torch.no_grad():
        ours(IDS)
    routes = recorder.routes()
    assert routes.agreement(expected.routes()).tokens == 1.0
    with replay(model, routes), torch.no_grad():
        assert torch.equal(forward(model, IDS), logits)
    others = of_four(model, seed=3)
    with replay(model, others), torch.no_grad():
        given = forward(model, IDS)
    assert not torch.allclose(given, logits, atol=1e-3)
    with replay_ours(ours, others.with_fingerprint(expected.fingerprint)), torch.no_grad():
        assert_close(given, ours(IDS).logits, "logits of other experts", room=1e-5)


def test_gradients_reach_the_router_as_in_our_model():
    model = build()
    routes = of_four(model, seed=5)
    with replay(model, routes):
        backward(model, IDS)
    ours = to_hugging_face(model)
    with record_ours(ours) as recorder:
        pass
    with replay_ours(ours, routes.with_fingerprint(recorder.fingerprint)):
        ours(IDS).logits.square().mean().backward()
    for layer in range(LAYERS):
        pairs = zip(
            model.decoder.layers[layer].mlp.router.l2r.named_parameters(),
            ours.model.layers[layer].mlp.gate.named_parameters(),
            strict=True,
        )
        for (name, theirs), (_, mine) in pairs:
            assert mine.grad.abs().max() > 0
            assert_close(theirs.grad, mine.grad, name, room=1e-4)


def test_its_own_replay_takes_what_we_write():
    """As Megatron's users feed it: by lists in the order in which layers were made."""
    RouterReplay.clear_global_router_replay_instances()
    model = build().eval()
    routes = of_four(model, seed=1)
    with replay(model, routes), torch.no_grad():
        expected = forward(model, IDS)
    from megatron.core.transformer.moe.router_replay import RouterReplayAction as Action

    RouterReplay.set_replay_data(to_megatron(routes))
    RouterReplay.set_global_router_replay_action(Action.REPLAY_FORWARD)
    with torch.no_grad():
        assert torch.equal(forward(model, IDS), expected)
    RouterReplay.clear_global_router_replay_action()
    RouterReplay.clear_global_indices()


def test_tokens_without_a_route_choose_for_themselves():
    model = build().eval()
    full = of_four(model, seed=2)
    cut = full.truncated(12)
    with record(model) as plain, torch.no_grad():
        forward(model, IDS)
    with replay(model, cut.extended(4)), record(model) as recorder, torch.no_grad():
        forward(model, IDS)
    taken = recorder.routes().padded()[0]
    assert torch.equal(taken[:, :12], full.padded()[0][:, :12])
    own = plain.routes().padded()[0]
    assert torch.equal(taken[:, 12:, 0], own[:, 12:, 0])  # later layers see other tokens before
    with replay(model, cut, side="left"), record(model) as recorder, torch.no_grad():
        forward(model, IDS)
    taken = recorder.routes().padded()[0]
    assert torch.equal(taken[:, 4:], full.padded()[0][:, :12])
    assert torch.equal(taken[:, :4, 0], own[:, :4, 0])


@pytest.mark.parametrize("order", ["together", "first first", "last first"])
def test_recomputed_layers_take_the_routes_of_their_own_call(order):
    """Two micro-batches in flight; a recomputation that took the other's would change gradients."""
    recompute = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    found = []
    for changes in ({}, recompute):
        model = build(**changes)
        routes = of_four(model, seed=7)
        with replay(model, routes):
            losses = [forward(model, half).square().mean() for half in IDS.chunk(2)]
            if order == "together":
                sum(losses).backward()
            else:
                for loss in losses if order == "first first" else losses[::-1]:
                    loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert_close(found[1][name], value, name, room=1e-5)


def test_nothing_of_another_model_changes_and_nothing_stays():
    one, two = build().eval(), build().eval()
    with torch.no_grad():
        plain = forward(two, IDS)
        with replay(one, of_four(one, seed=4)):
            assert torch.equal(forward(two, IDS), plain)
            replayed = forward(one, IDS)
        assert torch.equal(forward(one, IDS), plain) and not torch.equal(replayed, plain)
    for model in (one, two):
        for layer in model.decoder.layers:
            own = layer.mlp.router.router_replay
            assert "get_replay_topk" not in vars(own)
            assert (own.router_replay_action, own.target_topk_idx) == (None, None)
            assert own.replay_backward_list == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[:2], "a call reads 4 sequences; 2 of"),
        (lambda r: r.extended(1), "width must be at least 17"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_forward(change, message):
    model = build()
    ran = []
    model.decoder.layers[0].register_forward_pre_hook(lambda *_: ran.append(1))
    routes = of_four(model)
    ran.clear()
    with pytest.raises(ValueError, match=message), replay(model, change(routes)):
        forward(model, IDS)
    assert not ran


def test_a_model_without_replay_is_recorded_as_one_with_it():
    plain, model = small(SIPS).eval(), build().eval()
    recorded = []
    for each in (plain, model, plain):
        with record(each) as recorder, torch.no_grad():
            forward(each, IDS)
        recorded.append(recorder.routes())
    assert recorded[0] == recorded[1] == recorded[2]
    assert plain.decoder.layers[0].mlp.router.router_replay is None


def test_a_model_that_cannot_replay_is_refused():
    off = "moe_enable_routing_replay must be True"
    model = build()
    with pytest.raises(ValueError, match=off), replay(small(SIPS), of_four(model)):
        pass
    few = drawn([16] * 4, type(of_four(model).fingerprint)(num_experts=3, top_k=2, layers=(0, 1)))
    other = "the same num_experts; got 3 in the routes and 4"
    with pytest.raises(ValueError, match=other), replay(model, few):
        pass
    with pytest.raises(ValueError, match="it saw none"), replay(model, of_four(model)):
        pass


def both(rank, folder, start):
    """TP 2 with sequence parallel and EP 2: own routes, and gradients with given ones."""
    on_cpu()
    parallel_state.initialize_model_parallel(**PARALLEL)
    model = build(**PARALLEL, sequence_parallel=True, norm=Norm)
    with torch.no_grad():
        for name, p in model.named_parameters():
            value, cut = start[own_name(name, rank)], getattr(p, "partition_dim", -1)
            sliced = cut >= 0 and ".experts." not in name
            p.copy_(value.chunk(2, cut)[rank] if sliced else value)
    with record(model) as recorder, torch.no_grad():
        forward(model, IDS)
    routes = recorder.routes()
    with replay(model, drawn([16] * 4, recorder.fingerprint, 9)), record(model) as again:
        logits = forward(model, IDS)
    parallel_state.destroy_model_parallel()
    return routes, again.routes(), logits.detach()


@pytest.mark.engine("megatron", "routes")
def test_two_ranks_record_and_replay_whole_sequences(tmp_path):
    model = build(norm=Norm)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    with record(model) as recorder, torch.no_grad():
        forward(model, IDS)
    given = drawn([16] * 4, recorder.fingerprint, 9)
    with replay(model, given), torch.no_grad():
        expected = forward(model, IDS)
    ranks = on_two_ranks(both, tmp_path, tmp_path, start)
    logits = torch.cat([rank[2] for rank in ranks], dim=-1)
    assert_close(logits, expected, "logits of two ranks", room=1e-5)
    for own, taken, _ in ranks:
        assert own == recorder.routes()
        assert taken == given


def test_sizes_are_those_of_the_model():
    model = build()
    f = of_four(model).fingerprint
    assert (f.num_experts, f.top_k, f.layers, f.hidden_layers) == (EXPERTS, TOP_K, (0, 1), LAYERS)


def test_layers_of_multi_token_prediction_have_no_routes():
    """Megatron counts them from 1 again: they would stand for the first layers."""
    model = build()
    with record(model) as plain, torch.no_grad():
        forward(model, IDS)
    model.mtp = torch.nn.ModuleList([build().decoder.layers[0]])
    with record(model) as recorder, torch.no_grad():
        forward(model, IDS)
    assert recorder.routes() == plain.routes()
