"""torch.compile without graph breaks, in a process without the type checks of the test run."""

import pytest

from tests.processes import script

pytestmark = pytest.mark.slow("a compiler")

SCRIPT = """
import torch
from l2r import build_router, router_names
for kind in router_names():
    torch._dynamo.reset()
    router = build_router(kind, hidden_size=16, num_experts=4, top_k=2)
    x = torch.randn(5, 16)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    ours, plain = compiled(x), router(x)
    torch.testing.assert_close(ours.logits, plain.logits)
    ours.logits.sum().backward()
    print(kind)
"""


def test_every_router_compiles_into_one_graph(tmp_path):
    assert "l2r_sips" in script(tmp_path, SCRIPT).succeed()


CAPTURES = """
import torch
from l2r import L2rOlmoeConfig, L2rOlmoeForCausalLM, capture
sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2}
heads = {"num_attention_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
model = L2rOlmoeForCausalLM(L2rOlmoeConfig(router={"kind": "l2r_sips"}, **sizes, **heads))
compiled = torch.compile(model, backend="eager", fullgraph=True)
ids = torch.randint(64, (2, 8))
plain = compiled(input_ids=ids).logits
for _ in range(3):
    with capture(compiled) as outer:
        assert torch.equal(compiled(input_ids=ids).logits, plain)
        with capture(compiled) as inner:
            compiled(input_ids=ids)
    assert [len(calls) for calls in outer.outputs.values()] == [2, 2]
    assert [len(calls) for calls in inner.outputs.values()] == [1, 1]
    compiled(input_ids=ids)
with capture(compiled) as many:
    for step in range(10):  # torch gives up after eight graphs
        compiled(input_ids=(ids + step) % 64)
for step in range(10):
    with capture(model) as eager:
        model(input_ids=(ids + step) % 64)
    for ours, (calls, (theirs,)) in zip(
        [calls[step] for calls in many.outputs.values()], eager.outputs.items(), strict=True
    ):
        torch.testing.assert_close(ours.logits, theirs.logits)
sum(logits.sum() for logits in many.logits()).backward()
with capture(compiled) as inside, torch.no_grad():  # generate calls the model inside, eagerly
    model(input_ids=ids)
    assert [len(calls) for calls in inside.outputs.values()] == [1, 1]
assert all(p.grad is not None for n, p in model.named_parameters() if ".gate." in n)
graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
assert graphs <= 3, graphs  # without, with one and with two captures
print("captured")
"""


def test_capture_records_a_model_that_was_compiled_before(tmp_path):
    assert "captured" in script(tmp_path, CAPTURES).succeed()
