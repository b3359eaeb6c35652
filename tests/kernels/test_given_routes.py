"""The kernels weigh given experts: float64 plain code's numbers, own choices to the bit."""

import pytest
import torch
from routing_cases import (
    TOLERANCE,
    Case,
    check_gradients,
    device_of,
    double,
    error,
    leaves,
    route,
)
from torch import Tensor
from torch.library import opcheck

from l2r.kernels import cpu, dispatch, operation, plain
from l2r.kernels.contract import INPUTS, Tensors
from l2r.kernels.dispatch import implementation
from l2r.kernels.native.build import library
from l2r.routers import build_router
from l2r.routers.selection_rule import Selection

CASES = [
    Case(13, 24, 9, 3, 2, 3),
    Case(13, 24, 9, 3, 2, 3, normalize=True),
    Case(50, 40, 20, 3, 16, 4, normalize=True),  # by blocks of tokens
    Case(1, 12, 6, 2, 2, 2),
    Case(4, 20, 600, 1, 2, 8, scoring="dot"),  # a bound is found first
    Case(13, 24, 9, 3, 2, 3, x_dtype=torch.bfloat16),
    Case(13, 24, 9, 3, 2, 3, x_dtype=torch.bfloat16, dtype=torch.bfloat16),
]
pytestmark = pytest.mark.usefixtures("unchecked")


TRITON = pytest.param("triton", marks=pytest.mark.slow("Triton's interpreter"))


@pytest.fixture(params=["compiled", "blocks", TRITON])
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Backend of each form; the C++ form where a compiler is found."""
    if request.param == "compiled" and library() is None:
        pytest.skip("no C++ compiler")
    if request.param == "blocks":
        monkeypatch.setattr(cpu, "library", lambda: None)
    return "triton" if request.param == "triton" else "cpu"


def drawn(case: Case) -> Tensor:
    """Experts that no router chose; every third token has none."""
    draw = torch.Generator().manual_seed(3)
    routes = torch.rand(case.tokens, case.experts, generator=draw).argsort(dim=1)
    routes = routes[:, : case.top_k].contiguous()
    routes[1::3] = -1
    return routes


@pytest.mark.parametrize("case", CASES, ids=str)
def test_weights_and_gradients_equal_float64(name: str, case: Case, poisoned: None) -> None:
    inputs, routes = case.inputs(device_of(name)), drawn(case)
    ours, exact = leaves(inputs), double(inputs)
    with implementation(name):
        routed = route(ours, **case.options(), routes=routes.to(device_of(name)))
    followed = torch.where(routes[:, :1] < 0, routed.indices.cpu(), routes)
    assert torch.equal(routed.indices.cpu(), followed)
    wanted = route(exact, plain, **case.options(), routes=followed)
    query = plain.routing_query(exact["x"], exact["projection"], exact["gain"])
    tolerance = case.tolerance(query)
    assert error(routed.logits, wanted.logits) <= tolerance
    assert error(routed.weights, wanted.weights) <= 4 * tolerance
    slope = torch.linspace(-1, 1, routed.weights.numel(), dtype=torch.float64)
    for result in (routed, wanted):
        loss = (result.weights.double().cpu() * slope.view_as(result.weights)).sum()
        (loss + result.logits.double().cpu().sin().sum() / case.experts).backward()
    check_gradients(ours, exact, tolerance)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_own_choices_given_back_are_equal_to_the_bit(name: str, case: Case, trained: bool) -> None:
    results = []
    routes = None
    for _ in range(2):
        inputs = leaves(case.inputs(device_of(name)))
        with implementation(name), torch.set_grad_enabled(trained):
            routed = route(inputs, **case.options(), routes=routes)
        if trained:
            (routed.weights.square().sum() + routed.logits.sin().sum()).backward()
        gradients = [leaf.grad for leaf in inputs.values() if leaf is not None and trained]
        results.append([*routed, *gradients])
        routes = routed.indices
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(second, first, rtol=0, atol=0)


@pytest.mark.parametrize("normalize", [True, False])
def test_logits_alone_weigh_given_experts(name: str, normalize: bool) -> None:
    case = Case(300, 1, 40, 1, 1, 4)
    logits = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    routes, device = drawn(case), device_of(name)
    with implementation(name):
        weights, indices = dispatch.softmax_top_k(
            logits.to(device), 4, normalize=normalize, routes=routes.to(device)
        )
    wanted, chosen = plain.softmax_top_k(logits.double(), 4, normalize=normalize, routes=routes)
    assert torch.equal(indices.cpu(), chosen)
    assert error(weights, wanted) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("backend", ["cpu", TRITON])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch 2.15's own
def test_the_registered_operation_passes_opcheck(backend: str, top_k: int) -> None:
    case = Case(6, 12, 5, 2, 2, 2)
    device = device_of(backend)
    x, weight, gain, anchors = leaves(case.inputs(device)).values()
    options = ("sips", list(case.score()[1:]), 2, True, backend)
    if top_k:
        given = Tensors(x, weight, gain, anchors, routes=drawn(case).to(device))
    else:
        logits = torch.randn(6, 5, device=device, requires_grad=True)
        given = Tensors(logits=logits, routes=drawn(case).to(device))
    opcheck(operation._route, (*given[:INPUTS], *options))


@pytest.mark.parametrize("kind", ["l2r_sips", "linear"])
def test_a_compiled_router_takes_routes_in_one_graph(kind: str) -> None:
    torch.manual_seed(0)
    router = build_router(kind, hidden_size=12, num_experts=9, top_k=3)
    case = Case(13, 12, 9, 1, 2, 3)
    x, routes = case.inputs("cpu")["x"], drawn(case)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(x, routes=routes), router(x, routes=routes)
    assert torch.equal(found.indices, wanted.indices)
    assert error(found.weights, wanted.weights.double()) <= 2 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("form", ["compiled", "blocks", "plain"])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("expert", [5, 2**40])
def test_a_route_to_no_expert_is_refused(
    form: str, trained: bool, expert: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "blocks":
        monkeypatch.setattr(cpu, "library", lambda: None)
    case = Case(6, 12, 5, 2, 2, 2)
    routes = drawn(case)
    routes[3, 1] = expert
    inputs = leaves(case.inputs("cpu"))
    which = implementation("plain" if form == "plain" else "cpu")
    with which, torch.set_grad_enabled(trained), pytest.raises(ValueError, match="between 0 and 4"):
        route(inputs, **case.options(), routes=routes)


@pytest.mark.parametrize("form", ["compiled", "blocks", "plain"])
@pytest.mark.parametrize("trained", [True, False])
def test_a_route_that_takes_an_expert_twice_is_refused(
    form: str, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token without a route of its own may hold anything after its first number."""
    if form == "blocks":
        monkeypatch.setattr(cpu, "library", lambda: None)
    case = Case(6, 12, 5, 2, 2, 3)
    routes, inputs = drawn(case), leaves(case.inputs("cpu"))
    routes[1] = torch.tensor([-1, 2, 2])
    which = implementation("plain" if form == "plain" else "cpu")
    with which, torch.set_grad_enabled(trained):
        route(inputs, **case.options(), routes=routes)
        routes[3] = torch.tensor([4, 0, 4])
        with pytest.raises(ValueError, match="token 3 has expert 4 twice"):
            route(inputs, **case.options(), routes=routes)


@pytest.mark.parametrize("kind", ["linear", "l2r_sips"])
def test_a_router_refuses_an_expert_twice(kind: str) -> None:
    router = build_router(kind, hidden_size=12, num_experts=5, top_k=2).eval()
    with pytest.raises(ValueError, match="token 0 has expert 1 twice"):
        router(torch.randn(1, 12), routes=torch.tensor([[1, 1]]))


def test_normalized_weights_of_unlikely_routes_are_right(name: str) -> None:
    """The likeliest expert is e^90 to e^310 times as likely as those of the routes."""
    device = device_of(name)
    logits = torch.tensor([[0.0, -90.0, -95.0, -300.0, -310.0]] * 2).to(device).requires_grad_()
    routes = torch.tensor([[1, 2], [3, 4]]).to(device)
    with implementation(name):
        weights, _ = dispatch.softmax_top_k(logits, 2, normalize=True, routes=routes)
        with torch.no_grad():  # small batches are trained in plain code
            kernel, _ = dispatch.softmax_top_k(logits, 2, normalize=True, routes=routes)
    torch.testing.assert_close(kernel, weights)
    (grad,) = torch.autograd.grad(weights[:, 0].sum(), logits)
    gaps = torch.tensor([5.0, 10.0]).to(device)
    torch.testing.assert_close(weights[:, 0], torch.sigmoid(gaps))
    torch.testing.assert_close(weights[:, 1], torch.sigmoid(-gaps))
    slope = torch.sigmoid(gaps) * torch.sigmoid(-gaps)
    torch.testing.assert_close(grad[0, 1], slope[0])
    torch.testing.assert_close(grad[1, 3], slope[1])


def test_routes_that_do_not_fit_the_call_are_refused() -> None:
    case = Case(6, 12, 5, 2, 2, 2)
    inputs, routes = case.inputs("cpu"), drawn(case)
    for wrong, match in (
        (routes[:5], r"routes must be \[6"),
        (routes[:, :1], r"routes must be \[6, 2\]; got \[6, 1\]"),
        (routes.int(), "routes must be of torch.int64"),
        (routes[0], r"routes must be \[6"),
    ):
        with pytest.raises(ValueError, match=match):
            route(inputs, **case.options(), routes=wrong)
    router = build_router("l2r_sips", hidden_size=12, num_experts=5, top_k=2)
    router.selection = Selection(gate="sigmoid")
    with pytest.raises(ValueError, match="routes need a softmax top-k selection"):
        router(inputs["x"], routes=routes)
