"""What only a GPU can show: full sizes, CUDA graphs, memory. Collected where there is one."""

import pytest
import torch
from routing_cases import Case, error, leaves, route

from l2r.kernels import plain
from l2r.kernels.dispatch import implementation
from l2r.routers import build_router

FULL = Case(4096, 2048, 64, 16, 2, 8)
WIDE = Case(1000, 1024, 1024, 4, 16, 8)
XMOE = Case(4096, 2048, 64, 1, 32, 8, scoring="cosine", gain=False)


@pytest.mark.parametrize("case", [FULL, WIDE, XMOE], ids=["full", "wide", "xmoe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_full_size_equals_float64(case: Case, dtype: torch.dtype) -> None:
    inputs = case.inputs("cuda")
    inputs["x"] = inputs["x"].to(dtype)
    ours = leaves(inputs)
    exact = {
        k: None if v is None else v.double().detach().requires_grad_() for k, v in ours.items()
    }
    routed = route(ours, **case.options())
    reference = route(exact, plain, **case.options())
    assert error(routed.logits, reference.logits.cpu()) <= 1e-4
    scale = torch.randn_like(reference.logits)
    for result in (routed, reference):
        value = (result.logits.double() * scale).sum() + result.weights.double().square().sum()
        value.backward()
    for name, leaf in ours.items():
        if leaf is not None:
            limit = 1e-2 if leaf.dtype == torch.bfloat16 else 1e-3
            assert error(leaf.grad, exact[name].grad.cpu()) <= limit, name


@pytest.mark.parametrize("kind", ["l2r_sips", "xmoe", "linear"])
@pytest.mark.parametrize("tokens", [1, 300])
def test_cuda_graph_replays_forward_and_backward(kind: str, tokens: int) -> None:
    router = build_router(kind, hidden_size=256, num_experts=64, top_k=8).cuda()
    static = torch.randn(tokens, 256, device="cuda", requires_grad=True)
    parameters = [static, *router.parameters()]

    def step() -> list[torch.Tensor]:
        output = router(static)
        loss = output.weights.square().sum() + output.logits.sin().sum()
        return [output.logits, output.weights, *torch.autograd.grad(loss, parameters)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        static.copy_(torch.randn_like(static))
    graph.replay()
    for found, wanted in zip(captured, step(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_full_size_is_bitwise_repeatable() -> None:
    results = []
    for _ in range(3):
        ours = leaves(FULL.inputs("cuda"))
        routed = route(ours, **FULL.options())
        (routed.weights.sum() + routed.logits.sin().sum()).backward()
        results.append([routed.logits, routed.weights, *(leaf.grad for leaf in ours.values())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_extra_memory_is_at_most_linear() -> None:
    x = torch.randn(4096, 2048, device="cuda", requires_grad=True)

    def peak(kind: str, name: str) -> int:
        router = build_router(kind, hidden_size=2048, num_experts=64, top_k=8).cuda()
        for _ in range(2):
            router.zero_grad()
            x.grad = None
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with implementation(name):
                output = router(x)
            (output.weights.sum() + output.logits.sum()).backward()
            found = torch.cuda.max_memory_allocated() - before
        return found

    assert peak("l2r_sips", "triton") <= 1.2 * peak("linear", "plain")
