"""The Triton kernels equal float64 plain code, outputs and gradients, at any size."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from routing_cases import Case, cases, check_logits, check_route, error, leaves, route

from l2r.kernels import dispatch, plain
from l2r.kernels.dispatch import implementation
from tests.tiers import few

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
quick = settings(
    deadline=None,
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

EDGES = [
    Case(3, 1100, 9, 2, 8, 2),
    Case(3, 1100, 9, 2, 8, 2, gain=False, dtype=torch.bfloat16, x_dtype=torch.bfloat16),
    Case(0, 8, 4, 2, 2, 2),
    Case(1, 8, 4, 2, 2, 2),
    Case(1, 1, 1, 1, 1, 1),
    Case(33, 17, 5, 3, 2, 5, normalize=True),
    Case(3, 65, 600, 2, 2, 8),
    Case(3, 20, 1024, 1, 3, 4, scoring="dot"),
    Case(4, 70, 130, 3, 64, 3),
    Case(9, 33, 17, 64, 2, 8, scoring="cosine"),
    Case(6, 130, 9, 2, 33, 2, gain=False),
]


@pytest.mark.slow("Triton's interpreter")
@given(case=cases())
@quick
def test_route_equals_plain_float64(poisoned: None, case: Case) -> None:
    check_route("triton", DEVICE, case)


@pytest.mark.parametrize("case", few(EDGES, EDGES[:6], "Triton's interpreter"), ids=str)
def test_route_equals_plain_float64_at_the_edges(poisoned: None, case: Case) -> None:
    check_route("triton", DEVICE, case)


def test_logits_alone_equal_plain_float64(poisoned: None) -> None:
    check_logits("triton", DEVICE, Case(5, 20, 9, 3, 2, 2))


@pytest.mark.slow("Triton's interpreter")
@given(case=cases())
@quick
def test_logits_equal_plain_float64(poisoned: None, case: Case) -> None:
    check_logits("triton", DEVICE, case)


@given(
    tokens=st.integers(0, 20),
    experts=st.integers(1, 100),
    top_k=st.integers(1, 6),
    normalize=st.booleans(),
    seed=st.integers(0, 10**6),
)
@quick
def test_softmax_top_k_equals_plain(
    poisoned: None, tokens: int, experts: int, top_k: int, normalize: bool, seed: int
) -> None:
    top_k = min(top_k, experts)
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(tokens, experts, generator=generator)
    ours = logits.to(DEVICE, copy=True).requires_grad_()
    exact = logits.double().requires_grad_()
    with implementation("triton"):
        weights, indices = dispatch.softmax_top_k(ours, top_k, normalize=normalize)
    wanted, chosen = plain.softmax_top_k(exact, top_k, normalize=normalize)
    assert torch.equal(indices.cpu(), chosen)
    # A sum of up to 100 terms: 100 * 2**-24, and as much again in the backward pass.
    assert error(weights, wanted) <= 1e-5
    scale = torch.linspace(-1, 1, weights.numel(), dtype=torch.float64).view_as(wanted)
    (weights.double() * scale.to(DEVICE)).sum().backward()
    (wanted * scale).sum().backward()
    assert error(ours.grad, exact.grad) <= 2e-5


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, in the interpreter
def test_nan_input_gives_indices_in_range() -> None:
    case = Case(5, 12, 7, 2, 2, 3)
    inputs = case.inputs(DEVICE)
    inputs["x"][2] = float("nan")
    with implementation("triton"):
        routed = route(inputs, **case.options())
    assert bool(((routed.indices >= 0) & (routed.indices < 7)).all())
    assert bool(torch.isnan(routed.logits[2]).all())
    assert not bool(torch.isnan(routed.logits[[0, 1, 3, 4]]).any())


def test_zero_query_and_zero_anchor_have_finite_gradients() -> None:
    case = Case(4, 12, 5, 2, 2, 2)
    inputs = case.inputs(DEVICE)
    inputs["x"][1] = 0
    inputs["anchors"][2, 1] = 0
    ours = leaves(inputs)
    with implementation("triton"):
        routed = route(ours, **case.options())
    routed.weights.sum().backward()
    for leaf in ours.values():
        assert bool(torch.isfinite(leaf.grad).all())


def test_inputs_need_not_be_contiguous() -> None:
    case = Case(6, 20, 8, 2, 2, 2)
    inputs = case.inputs(DEVICE)
    strided = {name: value.mT.contiguous().mT for name, value in inputs.items() if value.dim() > 1}
    with implementation("triton"):
        one = route(inputs, **case.options())
        two = route({**inputs, **strided}, **case.options())
    assert torch.equal(one.logits, two.logits)


@pytest.mark.slow("Triton's interpreter")
def test_same_numbers_every_time() -> None:
    case = Case(70, 40, 16, 4, 2, 4)
    results = []
    for _ in range(2):
        ours = leaves(case.inputs(DEVICE))
        with implementation("triton"):
            routed = route(ours, **case.options())
        (routed.weights.sum() + routed.logits.sin().sum()).backward()
        results.append([routed.logits, routed.weights, *(leaf.grad for leaf in ours.values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Recorder:
    """A kernel that keeps what each of its launches is compiled for."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **blocks: int) -> None:
            self.launches.append((_compiled_for(args), blocks))
            self.kernel[grid](*args, **blocks)

        return launch


def _compiled_for(argument: Any) -> Any:
    if isinstance(argument, tuple):
        return tuple(_compiled_for(part) for part in argument)
    return argument.dtype if isinstance(argument, torch.Tensor) else type(argument)


@pytest.mark.parametrize("case", [Case(5, 20, 9, 3, 2, 2), Case(5, 600, 600, 1, 33, 2)], ids=str)
def test_replay_training_and_any_number_of_tokens_run_the_same_compiled_kernels(
    monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    """On an H100 kernels compiled with and without routes gave logits one bit apart."""
    monkeypatch.setenv("L2R_GUARD", "off")  # its comparison launches kernels once more

    def launches(tokens: int = 5, *, routed: bool = False, trained: bool = False) -> list[Any]:
        recorders = [Recorder(launch.project_kernel), Recorder(launch.forward_kernel)]
        routes = torch.zeros(tokens, 2, dtype=torch.int64, device=DEVICE) if routed else None
        inputs = leaves(replace(case, tokens=tokens).inputs(DEVICE))
        with monkeypatch.context() as patch, implementation("triton"):
            patch.setattr(launch, "project_kernel", recorders[0])
            patch.setattr(launch, "forward_kernel", recorders[1])
            with torch.set_grad_enabled(trained):
                route(inputs, **case.options(), routes=routes)
        return [recorder.launches for recorder in recorders]

    from l2r.kernels.triton import launch

    plain_call = launches()
    assert all(plain_call)
    assert launches(routed=True) == plain_call
    assert launches(trained=True) == plain_call
    assert launches(tokens=70) == plain_call
