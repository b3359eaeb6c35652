"""A compiled model records and replays in one graph, which another block uses again."""

import jaxtyping
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from l2r import L2RConfig, build_router, record, replay
from l2r.hf.models.version_names import checkpoint_activations
from tests.hf.routes.models import drawn_for, family_model, token_ids

pytestmark = pytest.mark.slow("a compiler")


@pytest.fixture
def graphs(monkeypatch):
    """Number of graphs made so far."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # checks are not traceable
    torch.compiler.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch.compiler.reset()


def compiled_and_plain(name, swapped):
    model = family_model(name, swapped)
    model.set_experts_implementation("batched_mm")  # which CPUs compile
    return torch.compile(model, backend="aot_eager", fullgraph=True), model


class Scaled(nn.Module):
    """A layer whose experts are numbers."""

    def __init__(self, router):
        super().__init__()
        self.router = router
        self.scales = nn.Parameter(torch.arange(8.0))

    def forward(self, x):
        _, weights, indices = self.router(x)
        return (weights * self.scales[indices]).sum(dim=-1)


def block_of(name):
    """A family's block with its router, or a router of ours: they compile sooner than a model."""
    if name == "ours":
        config = L2RConfig(rank=2, heads=4)
        return Scaled(build_router(config, hidden_size=32, num_experts=8, top_k=2))
    return compiled_and_plain(name, swapped=False)[1].model.layers[1].mlp


def logits_and_gradients(model, ids):
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    logits.logsumexp(-1).sum().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore:(?s)Dynamo detected a call to a `functools")
def test_blocks_of_a_model_use_one_graph_with_checkpointing(graphs):
    compiled, model = compiled_and_plain("olmoe", swapped=True)
    checkpoint_activations(model.train())
    ids = token_ids()
    own = compiled(ids, use_cache=False).logits.detach()  # compiled before any block
    before = graphs()
    for seed in range(3):
        routes = drawn_for(model, (12, 12), seed)
        with replay(model, routes):
            expected, gradients = logits_and_gradients(model, ids)
        with replay(compiled, routes):
            logits, ours = logits_and_gradients(compiled, ids)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
        for gradient, theirs in zip(ours, gradients, strict=True):
            torch.testing.assert_close(gradient, theirs, rtol=0, atol=1e-4)
        assert not torch.allclose(logits, own, atol=1e-3)
    assert graphs() == before + 1
    assert torch.equal(compiled(ids, use_cache=False).logits, own)
    assert graphs() == before + 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", ["ours", "olmoe", "deepseek_v3"])
@torch.no_grad()
def test_a_compiled_recorder_sees_every_call(name, graphs):
    block = block_of(name)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    batches = [torch.randn(2, 12, 32) for _ in range(3)]
    before = compiled(batches[0])
    with record(compiled) as recorder:
        for x in batches:
            compiled(x)
    with record(block) as plain:
        for x in batches:
            block(x)
    assert recorder.routes() == plain.routes()
    with replay(compiled, plain.routes()[:2]):
        torch.testing.assert_close(compiled(batches[0]), before, rtol=0, atol=1e-5)
    assert graphs() == 3  # of the plain block, of recording and of replaying
    assert not counters["graph_break"]


def test_routes_of_other_lengths_do_not_compile_again_each_time(graphs):
    compiled = torch.compile(block_of("ours"), backend="aot_eager", fullgraph=True)
    made = []
    for rows in (2, 3, 4, 5):
        with replay(compiled, drawn_for(compiled, (12,) * rows)):
            compiled(torch.randn(rows, 12, 32)).sum().backward()
        made.append(graphs())
    assert made[-1] == made[1]  # the second size makes the graph of all sizes
