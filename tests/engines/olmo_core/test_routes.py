"""Routes of OLMo-core's routers: recorded, replayed, recomputed, on two ranks."""

import pytest
import torch

from l2r import record as record_ours
from l2r import replay as replay_ours
from tests.engines.engines import SIPS, assert_close, periodic
from tests.hf.routes.made import drawn
from tests.processes import on_two_ranks

from .models import LAYERS, VOCABULARY, small

from torch.distributed.device_mesh import init_device_mesh  # isort: skip

from l2r.engines.olmo_core.checkpoint import to_hugging_face  # isort: skip
from l2r.engines.olmo_core.routes import record, replay  # isort: skip

pytestmark = [
    pytest.mark.filterwarnings("ignore:Grouped GEMM not available"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
IDS = periodic(4, 16, VOCABULARY)


def build(**fields):
    return small(SIPS, **fields)[1].eval()


def of_four(model, seed=0):
    """Drawn routes of four sequences of 16 tokens."""
    with record(model) as recorder, torch.no_grad():
        model(IDS)
    return drawn([16] * 4, recorder.fingerprint, seed)


def test_records_what_our_model_records_and_replays_it_as_ours_does():
    model = build()
    ours = to_hugging_face(model).eval()
    with record(model) as recorder, torch.no_grad():
        logits = model(IDS)
    with record_ours(ours) as expected, torch.no_grad():
        ours(IDS)
    routes = recorder.routes()
    assert routes.agreement(expected.routes()).tokens == 1.0
    with replay(model, routes), torch.no_grad():
        assert torch.equal(model(IDS), logits)
    others = of_four(model, seed=3)
    with replay(model, others):
        given = model(IDS)
    assert not torch.allclose(given, logits, atol=1e-3)
    given.square().mean().backward()
    with replay_ours(ours, others.with_fingerprint(expected.fingerprint)):
        mine = ours(IDS).logits
    assert_close(given, mine.detach(), "logits of other experts", room=1e-5)
    mine.square().mean().backward()
    for layer in range(LAYERS):
        router = dict(model.blocks[str(layer)].feed_forward_moe.router.named_parameters())
        for name, p in ours.model.layers[layer].mlp.gate.named_parameters():
            theirs = router[name.replace(".", "_")].grad
            assert p.grad.abs().max() > 0
            assert_close(theirs.view(p.shape), p.grad, name, room=1e-4)


def test_normalized_weights_are_of_the_experts_that_are_taken():
    model = build(normalize_expert_weights=1.0)
    seen = []
    router = model.blocks["0"].feed_forward_moe.router
    routes = of_four(model, seed=3)
    router.register_forward_hook(lambda *call: seen.append(call[2]))
    with replay(model, routes), torch.no_grad():
        model(IDS)
    weights, experts, counts = seen[0][:3]
    assert torch.equal(experts, routes.padded()[0][:, :, 0])
    assert torch.equal(counts, experts.flatten().bincount(minlength=router.num_experts))
    assert_close(weights.sum(-1), torch.ones(4, 16), "sums")


def test_tokens_without_a_route_choose_for_themselves_and_nothing_stays():
    model = build()
    full = of_four(model, seed=2)
    with torch.no_grad():
        with record(model) as plain:
            logits = model(IDS)
        with replay(model, full.truncated(12), side="left"), record(model) as recorder:
            model(IDS)
        taken, own = recorder.routes().padded()[0], plain.routes().padded()[0]
        assert torch.equal(taken[:, 4:], full.padded()[0][:, :12])
        assert torch.equal(taken[:, :4, 0], own[:, :4, 0])
        assert torch.equal(model(IDS), logits)
    assert not any("get_top_k" in vars(module) for module in model.modules())


def test_what_does_not_fit_is_refused_before_the_forward():
    model = build()
    routes = of_four(model)
    ran = []
    model.blocks["0"].register_forward_pre_hook(lambda *_: ran.append(1))
    for change, message in (
        (routes[:2], "a call reads 4 sequences; 2 of"),
        (routes.extended(1), "width must be at least 17"),
    ):
        with pytest.raises(ValueError, match=message), replay(model, change):
            model(IDS)
    assert not ran


def both(rank, start):
    """TP 2, whose routers see half of every sequence; then FSDP2, whose ranks have other rows."""
    found = []
    for kind in ("tp", "fsdp"):
        model = build()
        model.load_state_dict(start)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp" if kind == "fsdp" else "tp",))
        ids, place = IDS, slice(None)
        if kind == "tp":
            model.apply_tp(mesh)
        else:
            model.apply_fsdp(dp_mesh=mesh)
            place = slice(2 * rank, 2 * rank + 2)
            ids = IDS[place]
        torch.manual_seed(7)
        model.init_weights(device=torch.device("cpu"))
        with record(model) as recorder, torch.no_grad():
            model(ids)
        given = drawn([16] * 4, recorder.fingerprint, 9)[place]
        with replay(model, given), record(model) as again, torch.no_grad():
            logits = model(ids)
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        found.append((recorder.routes(), again.routes() == given, logits.detach()))
    return found


@pytest.mark.engine("olmo-core", "routes")
def test_two_ranks_record_and_replay_whole_sequences(tmp_path):
    model = build()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(7)
    model.init_weights(device=torch.device("cpu"))
    with record(model) as recorder, torch.no_grad():
        model(IDS)
    own = recorder.routes()
    with replay(model, drawn([16] * 4, recorder.fingerprint, 9)), torch.no_grad():
        expected = model(IDS)
    for rank, (tp, fsdp) in enumerate(on_two_ranks(both, tmp_path, start)):
        rows = slice(2 * rank, 2 * rank + 2)
        assert tp[0] == own and tp[1] and fsdp[0] == own[rows] and fsdp[1]
        assert_close(tp[2], expected, "logits at TP 2", room=1e-5)
        assert_close(fsdp[2], expected[rows], "logits under FSDP2", room=1e-5)
