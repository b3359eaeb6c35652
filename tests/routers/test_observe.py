"""One hook per router, any number of reducers, ours and Hugging Face's routers alike."""

import pytest
import torch
from torch import nn

from l2r.routers import RouterOutput, build_router, capture
from l2r.routers.observe import find_routers, watched
from tests.analysis.diagnostics.models import batches, ours, stock


@pytest.mark.parametrize("make", [ours, stock])
def test_every_reducer_gets_every_call_from_one_hook_per_router(make):
    model, (batch,) = make(), batches(1)
    routers = find_routers(model)
    calls = {name: [] for name in routers}
    order = []

    def keep(x, output, where):
        calls[where].append((x, output))
        order.append(("keep", where))

    def count(x, output, where):
        order.append(("count", where))

    with torch.no_grad(), watched(routers, keep, count):
        assert [len(router._forward_hooks) for router in routers.values()] == [1] * len(routers)
        model(input_ids=batch["input_ids"])
    assert order == [(kind, name) for name in routers for kind in ("keep", "count")]
    for name, router in routers.items():
        ((x, output),) = calls[name]
        assert isinstance(output, RouterOutput) and not router._forward_hooks
        with torch.no_grad():
            again = router(x.reshape(-1, x.shape[-1]))
        for part, expected in zip(output, again, strict=True):
            torch.testing.assert_close(part, expected)


def test_capture_inside_a_watch_sees_the_same_outputs():
    model, (batch,) = ours(), batches(1)
    seen = {}
    watching = watched(find_routers(model), lambda x, output, where: seen.update({where: output}))
    with watching, capture(model) as record:
        model(input_ids=batch["input_ids"])
    assert {name: output for name, (output,) in record.outputs.items()} == seen


def test_a_router_called_by_keyword_is_seen():
    router, seen = build_router("linear", hidden_size=3, num_experts=4, top_k=2), []
    x = torch.ones(5, 3)
    with watched({"gate": router}, lambda x, output, where: seen.append((x, where))):
        router(x=x)
    ((given, where),) = seen
    assert given is x and where == "gate"


def test_a_router_that_two_blocks_share_is_found_once():
    first, second = nn.Module(), nn.Module()
    first.gate = second.gate = build_router("linear", hidden_size=3, num_experts=4, top_k=2)
    for block in (first, second):
        block.experts = nn.Linear(3, 3)
    assert set(find_routers(nn.ModuleList([first, second])).values()) == {first.gate}


def test_an_output_that_is_no_routing_is_refused():
    odd = nn.Linear(3, 2)
    with watched({"odd": odd}, lambda *call: None), pytest.raises(ValueError, match="must return"):
        odd(torch.ones(4, 3))
