"""The Triton kernels equal float64 plain code, outputs and gradients, at any size."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from routing_cases import Case, cases, double, error, leaves, mixed_loss

from l2r.functional import load_balancing_loss, router_z_loss
from l2r.kernels import dispatch, plain
from l2r.kernels.dispatch import implementation

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
quick = settings(
    deadline=None,
    max_examples=12,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

EDGES = [
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


def check_case(case: Case) -> None:
    inputs = case.inputs(DEVICE)
    ours, exact = leaves(inputs), double(inputs)
    with implementation("triton"):
        routed = dispatch.route(**ours, **case.options(), sums=True)
    reference = plain.route(**exact, **case.options(), sums=True)
    query = plain.routing_query(exact["x"], exact["projection"], exact["gain"])
    tolerance = case.tolerance(query)
    assert error(routed.logits, reference.logits) <= tolerance
    assert error(routed.lse, reference.lse) <= tolerance
    assert error(routed.sums[0], reference.sums[0]) <= tolerance
    check_choices(case, routed, reference, tolerance)
    loss, wanted = mixed_loss(routed, reference)
    loss.backward()
    wanted.backward()
    for name, leaf in ours.items():
        if leaf is None:
            continue
        rounding = 0.01 if leaf.dtype != torch.float32 else 0.0  # the gradient's own dtype
        assert leaf.grad.dtype == leaf.dtype
        found = error(leaf.grad, exact[name].grad)
        assert found <= 4 * tolerance + rounding, (name, found, tolerance)


def check_choices(
    case: Case, routed: plain.Routed, reference: plain.Routed, tolerance: float
) -> None:
    """The chosen experts have the k best scores; compared by score, since ties permute."""
    indices = routed.indices.cpu()
    probs = torch.softmax(reference.logits, 1)
    best = probs.topk(case.top_k, 1).values
    assert all(len(set(row)) == case.top_k for row in indices.tolist())
    assert error(probs.gather(1, indices), best) <= 4 * tolerance
    assert error(routed.weights, reference.weights) <= 4 * tolerance
    used = torch.bincount(indices.flatten(), minlength=case.experts)
    assert torch.equal(routed.sums[1].cpu().long(), used)


@given(case=cases())
@quick
def test_route_equals_plain_float64(poisoned: None, case: Case) -> None:
    check_case(case)


@pytest.mark.parametrize("case", EDGES, ids=str)
def test_route_equals_plain_float64_at_the_edges(poisoned: None, case: Case) -> None:
    check_case(case)


@given(case=cases(), with_rho=st.booleans())
@quick
def test_separate_steps_equal_plain_float64(poisoned: None, case: Case, with_rho: bool) -> None:
    inputs = case.inputs(DEVICE)
    ours, exact = leaves(inputs), double(inputs)
    constants = {"scoring": case.scoring, "gamma": 1.3, "beta": 0.8, "p": 3.0}
    rho = torch.linspace(-2, 2, case.tokens).to(case.dtype)
    rho = rho if with_rho and case.scoring == "sips" else None
    losses, queries, rhos = [], [], []
    for values, module in ((ours, dispatch), (exact, plain)):
        here = values["anchors"]
        rho_hat = None if rho is None else rho.to(here, copy=True).requires_grad_()
        with implementation("triton"):
            query = module.routing_query(values["x"], values["projection"], values["gain"])
            logits = module.anchor_logits(query, here, rho_hat=rho_hat, **constants)
        scale = torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view_as(logits)
        losses.append((logits.double() * scale.to(logits.device)).sum() + query.double().sum())
        queries.append(query)
        rhos.append(rho_hat)
    tolerance = case.tolerance(queries[1].detach())
    assert error(queries[0], queries[1]) <= tolerance
    assert error(losses[0], losses[1]) <= 4 * tolerance * max(1, case.experts)
    losses[0].backward()
    losses[1].backward()
    pairs = [(ours[name], exact[name]) for name in ours if ours[name] is not None]
    pairs += [(rhos[0], rhos[1])] if rho is not None else []
    for leaf, wanted in pairs:
        rounding = 0.01 if leaf.dtype != torch.float32 else 0.0
        assert error(leaf.grad, wanted.grad) <= 4 * tolerance + rounding


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


def test_by_products_are_the_auxiliary_losses() -> None:
    case = Case(30, 24, 10, 3, 2, 3)
    with implementation("triton"):
        routed = dispatch.route(**case.inputs(DEVICE), **case.options(), sums=True)
    wanted = router_z_loss(routed.logits)
    assert torch.allclose(routed.z_loss(), wanted, rtol=1e-5)
    wanted = load_balancing_loss(routed.logits, routed.indices)
    assert torch.allclose(routed.load_balancing_loss(), wanted, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, in the interpreter
def test_nan_input_gives_indices_in_range() -> None:
    case = Case(5, 12, 7, 2, 2, 3)
    inputs = case.inputs(DEVICE)
    inputs["x"][2] = float("nan")
    with implementation("triton"):
        routed = dispatch.route(**inputs, **case.options())
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
        routed = dispatch.route(**ours, **case.options())
    routed.weights.sum().backward()
    for leaf in ours.values():
        assert bool(torch.isfinite(leaf.grad).all())


def test_inputs_need_not_be_contiguous() -> None:
    case = Case(6, 20, 8, 2, 2, 2)
    inputs = case.inputs(DEVICE)
    strided = {name: value.mT.contiguous().mT for name, value in inputs.items() if value.dim() > 1}
    with implementation("triton"):
        one = dispatch.route(**inputs, **case.options())
        two = dispatch.route(**{**inputs, **strided}, **case.options())
    assert torch.equal(one.logits, two.logits)


def test_same_numbers_every_time() -> None:
    case = Case(70, 40, 16, 4, 2, 4)
    results = []
    for _ in range(2):
        ours = leaves(case.inputs(DEVICE))
        with implementation("triton"):
            routed = dispatch.route(**ours, **case.options(), sums=True)
        (routed.weights.sum() + routed.z_loss() + routed.load_balancing_loss()).backward()
        results.append([routed.logits, routed.sums, *(leaf.grad for leaf in ours.values())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
