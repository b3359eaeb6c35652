"""torch.compile without graph breaks, in a process without the type checks of the test run."""

from tests.processes import script

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
