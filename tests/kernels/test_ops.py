"""The registered operations survive compilation, checkpointing and torch's own checks."""

from typing import ClassVar

import pytest
import torch
from routing_cases import TOLERANCE, Case, error, leaves, route
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from l2r.functional.scoring import ScoreConstants
from l2r.kernels import dispatch, operation, plain, tracing
from l2r.kernels.contract import INPUTS, Tensors
from l2r.kernels.dispatch import implementation
from l2r.routers import build_router
from tests.tiers import few

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["triton"] if DEVICE == "cuda" else ["triton", "cpu"]
CASE = Case(6, 12, 5, 2, 2, 2)
FP32 = TOLERANCE[torch.float32]  # twice: both sides are rounded; four times more for gradients
SCORE = ScoreConstants("sips")


@pytest.mark.parametrize(
    "call",
    few(
        ["selection", "logits", "logits without a gain", "router"],
        ["selection", "router"],
        "every call",
    ),
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch 2.15's own
@pytest.mark.parametrize("name", BACKENDS)
def test_the_operation_passes_torch_opcheck(name: str, call: str) -> None:
    tensors = leaves(CASE.inputs(DEVICE))
    x, weight, gain, anchors = tensors.values()
    with implementation(name):
        logits = plain.route_logits(x, (weight, gain, anchors), SCORE).detach().requires_grad_()
        given, top_k = {
            "selection": (Tensors(logits=logits), 2),
            "logits": (Tensors(x, weight, gain, anchors), 0),
            "logits without a gain": (Tensors(x, weight, None, anchors), 0),
            "router": (Tensors(x, weight, gain, anchors), 2),
        }[call]
        options = (SCORE[0], list(SCORE[1:]), top_k, top_k > 0, name)
        opcheck(operation._route, (*given[:INPUTS], *options))


@pytest.mark.slow("a compiler")
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", ["l2r_sips", "xmoe", "linear"])
def test_compile_fullgraph_and_checkpoint_give_the_same_gradients(
    unchecked: None, name: str, kind: str
) -> None:
    torch.manual_seed(0)
    router = build_router(kind, hidden_size=12, num_experts=6, top_k=2).to(DEVICE)
    x = torch.randn(9, 12, device=DEVICE)

    def loss(x: torch.Tensor) -> torch.Tensor:
        logits, weights, _ = router(x)
        return weights.square().sum() + logits.sin().sum()

    def gradients(function, name: str) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
        leaf = x.clone().requires_grad_()
        router.zero_grad()
        with implementation(name):
            function(leaf).backward()
        return [leaf.grad, *(p.grad for p in router.parameters())]

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    wanted = gradients(loss, "plain")
    for function in (loss, compiled, lambda x: checkpoint(loss, x, use_reentrant=False)):
        for found, exact in zip(gradients(function, name), wanted, strict=True):
            assert error(found, exact.double()) <= 8 * FP32


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", ["linear", "linear_sips", "xmoe", "l2r_dot", "l2r_sips"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routers_give_the_plain_result(name: str, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    router = build_router(kind, hidden_size=24, num_experts=8, top_k=3).to(DEVICE)
    x = torch.randn(2, 5, 24, device=DEVICE, dtype=dtype)
    with implementation("plain"):
        wanted = router(x)
    with implementation(name):
        found = router(x)
    assert found.logits.dtype == torch.float32
    assert found.weights.dtype == dtype
    assert torch.equal(found.indices, wanted.indices)
    assert error(found.logits, wanted.logits.double()) <= 2 * FP32


@pytest.mark.parametrize("options", [{"learn_temperature": True}, {"query_norm": "batchnorm"}])
def test_learned_temperature_and_batch_norm_take_the_plain_path(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    """Their selection alone may run fused; no backend has a call of a query or a |q| alone."""
    router = build_router("l2r_sips", hidden_size=24, num_experts=8, top_k=3, **options)
    given = []
    run = dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda *call: given.append(call[2]) or run(*call))
    x = torch.randn(7, 24)
    found = router(x)
    assert all(tensors.x is None for tensors in given)
    with implementation("plain"):
        wanted = router(x)  # in training: the statistics are those of the batch both times
    assert torch.equal(found.logits, wanted.logits)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own
def test_float64_and_transforms_take_the_plain_path() -> None:
    router = build_router("l2r_sips", hidden_size=6, num_experts=4, top_k=2)
    x = torch.randn(3, 6)
    wide = router.double().logits(x.double())
    assert wide.dtype == torch.float64
    router = router.float()
    with implementation(BACKENDS[0]):
        jacobian = torch.func.jacrev(router.logits)(x[:1])
        tangent = torch.func.jvp(router.logits, (x,), (torch.ones_like(x),))[1]
    assert jacobian.shape == (1, 4, 1, 6)
    assert tangent.shape == (3, 4)


def gradients_of(router: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    output = router(x)
    (output.weights.square().sum() + output.logits.sin().sum()).backward()
    return [output.logits, *(p.grad for p in router.parameters())]


def test_a_dispatch_mode_is_seen_and_without_torchs_answer_everything_counts_as_watched(
    unchecked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    router = build_router("l2r_sips", hidden_size=12, num_experts=6, top_k=2)
    x = torch.randn(5, 12)
    assert not tracing.traced(x)
    with FlopCounterMode(display=False):
        assert tracing.traced(x)
    wanted = gradients_of(router, x)
    router.zero_grad()
    monkeypatch.setattr(tracing, "_dispatch_modes", None)
    assert tracing.traced(x)
    for found, exact in zip(gradients_of(router, x), wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own
@pytest.mark.parametrize("gone", ["_has_transforms", "_current_level"])
def test_transforms_are_seen_and_without_torchs_answer_plain_code_runs(
    unchecked: None, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(tracing.transformed())
        return x.sin()

    x = torch.randn(3)
    look(x)
    torch.func.vmap(look)(x)
    with torch.autograd.forward_ad.dual_level():
        look(x)
    assert seen == [False, True, True]
    if gone == "_current_level":
        monkeypatch.delattr(torch.autograd.forward_ad, gone)
    else:
        monkeypatch.setattr(tracing, gone, None)
    called: list[str] = []
    monkeypatch.setattr(dispatch, "run", lambda *args, **kwargs: called.append("fused"))
    build_router("l2r_sips", hidden_size=12, num_experts=6, top_k=2)(torch.randn(5, 12))
    assert not called


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own
@pytest.mark.parametrize("kind", ["l2r_sips", "xmoe"])
def test_transforms_inside_a_dispatch_mode_or_a_compiler_have_the_plain_gradients(
    unchecked: None, kind: str
) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    router = build_router(kind, hidden_size=12, num_experts=6, top_k=2)
    x, weights = torch.randn(5, 12), {n: p.detach() for n, p in router.named_parameters()}
    operations: list[object] = []

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(router, weights, (x,)).weights.square().sum()

    def graph(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        operations.extend(node.target for node in module.graph.nodes)
        return module

    with implementation("plain"):
        wanted = torch.func.grad(loss)(weights, x)
    with FlopCounterMode(display=False) as counter:
        counted = torch.func.grad(loss)(weights, x)
    assert counter.get_total_flops() > 0
    fused = torch.ops.l2r.route.default
    torch.compile(loss, backend=graph, fullgraph=True)(weights, x)
    assert fused in operations
    operations.clear()
    compiled = torch.compile(torch.func.grad(loss), backend=graph, fullgraph=True)(weights, x)
    assert operations
    assert fused not in operations
    for gradients in (counted, compiled):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name])


def test_unknown_implementation_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="implementation must be plain"),
        implementation("cudnn"),
    ):
        pass


class Watched(torch.Tensor):
    """A subclass that sees every function called on it, as DTensor and fake tensors do."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        cls.seen.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("grad", [True, False])
def test_subclasses_and_dispatch_modes_get_the_registered_operation(
    unchecked: None, grad: bool
) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    inputs = CASE.inputs(DEVICE)
    inputs["anchors"] = inputs["anchors"].as_subclass(Watched).requires_grad_(grad)
    with torch.set_grad_enabled(grad), implementation(BACKENDS[-1]):
        Watched.seen.clear()
        route(inputs, score=SCORE, top_k=2)
        assert any("route" in name for name in Watched.seen)
        with FlopCounterMode(display=False):
            route(CASE.inputs(DEVICE), score=SCORE, top_k=2)


def test_fake_tensors_are_never_read(unchecked: None) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    router = build_router("l2r_sips", hidden_size=12, num_experts=6, top_k=2)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        output = router(mode.from_tensor(torch.randn(5, 12)))
    assert output.logits.shape == (5, 6)
    assert output.indices.dtype == torch.int64


@pytest.mark.filterwarnings("ignore")  # of a trace, which fixes what depends on the input
@pytest.mark.parametrize("name", ["cpu", "plain"])
def test_a_trace_of_torch_jit_has_the_operation_in_it(name: str, unchecked: None) -> None:
    """Not the memory that a kernel filled unseen while it was made."""
    router = build_router("l2r_sips", hidden_size=16, num_experts=8, top_k=2).eval()
    first, second = torch.randn(2, 5, 16)
    with implementation(name), torch.no_grad():
        traced = torch.jit.trace(router, first, check_trace=False)
        for x in (first, second):
            for found, expected in zip(traced(x), router(x), strict=True):
                assert torch.equal(found, expected)
