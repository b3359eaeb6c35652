"""Constants of the proofs: never too small, and reached to two percent by some input.

Each is compared with the largest value of what it bounds, found on a fine grid in float64.
"""

import math

import pytest
import torch
from torch import Tensor

from l2r.analysis.certificates.anchor_bounds import Moments
from l2r.analysis.certificates.local_bounds import LocalBounds, query_metric
from l2r.analysis.certificates.query_magnitude import Identity, Radial, Saturated
from l2r.analysis.certificates.routing_map import AnchorMap

ROUNDING = 1e-5  # of second differences


def tight(found: float, bound: float) -> bool:
    """Whether a bound holds and is reached to two percent."""
    return 0.98 * bound < found <= bound * (1 + ROUNDING)


def directions(count: int = 2001) -> Tensor:
    """Unit vectors of the plane, [count, 2]; both axes are among them."""
    angles = torch.linspace(0, 2 * math.pi, count, dtype=torch.float64)
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def w_of(radial: Radial, query: Tensor) -> Tensor:
    """w = t(|q|) q / |q|."""
    rho = query.norm(dim=-1, keepdim=True)
    return radial.value(rho) * query / rho


def largest_second_derivative(radial: Radial, rho: float) -> float:
    """Of q -> w along unit directions at |q| = rho, by differences."""
    query, step = torch.tensor([rho, 0.0], dtype=torch.float64), 1e-4 * min(rho, 10.0)
    moved = step * directions()
    bent = w_of(radial, query + moved) + w_of(radial, query - moved) - 2 * w_of(radial, query)
    return float(bent.norm(dim=1).max()) / step**2


BENDS = math.atanh(1 / math.sqrt(3))  # where |tanh''| is largest


@pytest.mark.parametrize(
    ("radial", "low", "high", "at"),
    [
        (Saturated(3.0, beta=0.0), 0.3, 3.0, 0.3),  # all of it is the turning of u
        (Saturated(1.0, 1.0), 0.003, 0.003, 0.003),
        (Saturated(2.0, 0.5, 1.0, BENDS - 1000), 1000.0, 1000.0, 1000.0),  # all of it is tanh''
        (Saturated(2.0, 0.5, -3.0, 3000 + BENDS), 1000.0, 1000.0, 1000.0),
        (Saturated(1.0, 1.0, -1.7, 0.017), 0.01, 0.01, 0.01),  # t - rho t' at its largest
        (Saturated(2.0, 0.9, -100.0, 0.1), 0.001, 0.001, 0.001),
    ],
)
def test_the_curvature_is_the_largest_second_derivative(radial, low, high, at):
    bound = radial.curvature(torch.tensor(low).double(), torch.tensor(high).double()).item()
    assert tight(largest_second_derivative(radial, at), bound)


@pytest.mark.parametrize(
    "radial",
    [
        Identity(),
        Saturated(),
        Saturated(2.0, 0.5),
        Saturated(1.0, 1.0, -1.7, 0.4),
        Saturated(beta=0.0),
    ],
)
def test_no_second_derivative_is_above_the_curvature(radial):
    low, high = 0.2, 3.0
    bound = radial.curvature(torch.tensor(low).double(), torch.tensor(high).double()).item()
    for at in torch.linspace(low, high, 29).tolist():
        assert largest_second_derivative(radial, at) <= bound * (1 + ROUNDING) + 1e-6


def normed(norm_eps: float | None, radial: Radial, hidden: int = 5) -> tuple[AnchorMap, Tensor]:
    """A form with an RMSNorm, or without, and three inputs."""
    draw = torch.Generator().manual_seed(0)
    matrix = torch.randn(2, hidden, generator=draw, dtype=torch.float64)
    anchors = torch.randn(3, 2, 2, generator=draw, dtype=torch.float64)
    x = torch.randn(3, hidden, generator=draw, dtype=torch.float64)
    return AnchorMap(matrix, anchors, radial, norm_eps, floor=1e-6), x


@pytest.mark.parametrize("norm_eps", [None, 1e-5, 0.7])
def test_the_metric_of_the_query_is_that_of_its_jacobian(norm_eps):
    form, x = normed(norm_eps, Identity())
    metric = query_metric(form, x, form.query(x), form.rms(x))
    for token, found in zip(x, metric, strict=True):
        jacobian = torch.autograd.functional.jacobian(lambda t: form.query(t[None])[0], token)
        torch.testing.assert_close(found, jacobian @ jacobian.T, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_the_remainder_of_the_query_is_made_of_the_largest_changes_of_its_norm(share):
    """q1 - q0 - Dq d = (W d / n0) (n0 / n1 - 1) + q0 (n0 / n1 - 1 + a), with a = (n1 - n0)'s slope.

    With n1^2 = n0^2 (1 + 2 p u cos + p^2), p = |d| / (sqrt(D) n0), u = |x| / (sqrt(D) n0) <= 1.
    """
    form, x = normed(1e-5, Identity())
    local = LocalBounds.of(form, x, torch.tensor([[0], [1], [0]]))
    radius = share * 5**0.5 * local.rms
    angles = torch.linspace(0, math.pi, 4001, dtype=torch.float64)
    along = torch.linspace(0, 1, 101, dtype=torch.float64)[:, None] * angles.cos()
    change = (1 + 2 * share * along + share**2).rsqrt() - 1
    first, second = change.abs().max(), (change + share * along).abs().max()
    wanted = first * torch.linalg.matrix_norm(form.matrix, 2) * radius / local.rms
    wanted = wanted + second * form.query(x).norm(dim=1)
    torch.testing.assert_close(local._query_remainder(radius), wanted, rtol=1e-6, atol=0)


def planted(
    form: AnchorMap, moments: Moments, *, slope_gap_w: float, dq_dx: float = 1.0
) -> LocalBounds:
    """One token with |q| = 1 and two experts, of which all but some terms are left out."""
    one = torch.ones(1, dtype=torch.float64)
    return LocalBounds(
        form=form,
        moments=moments,
        slopes=torch.zeros(1, 2, 2, dtype=torch.float64),
        slope_gap_w=torch.full((1, 2, 2), slope_gap_w, dtype=torch.float64),
        dq_dx=dq_dx * one,
        dw_dq=one,
        rho=one,
        rms=one,
        size=one,
        matrix_norm=one,
        max_radius=one,
        floor=form.floor * (1 + 2 * one),
        hidden=5,
    )


def at_a_point(*, width: float = 0.0) -> Moments:
    """Moments of two experts whose anchors are ``width`` away from their mean."""
    zero = torch.zeros(1, 2, dtype=torch.float64)
    return Moments(zero, torch.zeros(1, 2, 2).double(), zero + width**2, zero + width)


def test_the_remainder_of_w_is_reached_by_a_small_step_across_the_query():
    radial, step = Saturated(beta=0.0), 1e-3
    form, _ = normed(None, radial)
    local = planted(form, at_a_point(), slope_gap_w=1.0)
    bound = -local.lower_bound(torch.zeros(1, 2, 2).double(), torch.tensor([step]).double())
    query = torch.tensor([1.0, 0.0], dtype=torch.float64)
    moved = step * directions()
    tangent = moved * torch.tensor([0.0, 1.0])  # Dw = I - u u^T
    gap = (w_of(radial, query + moved) - w_of(radial, query) - tangent).norm(dim=1).max()
    assert tight(gap.item(), bound[0, 0, 1].item())


def test_all_that_w_may_move_widens_the_bound_of_the_other_expert():
    """With w = q the step is |dq/dx| radius and the remainder of q, and both bounds have it."""
    gaps, radius = torch.zeros(1, 2, 2).double(), torch.tensor([0.1]).double()
    for norm_eps in (None, 1e-5):
        form, _ = normed(norm_eps, Identity())
        spread = planted(form, at_a_point(width=0.5), slope_gap_w=0.0, dq_dx=2.0)
        rest = spread._query_remainder(radius)
        wanted = spread.moments.above_tangent(2 * radius + rest)
        torch.testing.assert_close(-spread.lower_bound(gaps, radius)[:, 0], wanted)
        shifted = planted(form, at_a_point(), slope_gap_w=3.0, dq_dx=2.0)
        found = -shifted.lower_bound(gaps, radius)[0, 0, 1]
        torch.testing.assert_close(found, 3 * rest[0])


def two_anchors(share: float, distance: float) -> tuple[Moments, float]:
    """Anchors 0 and 1 on the first axis with given shares, and log E exp((m - mean) d)."""
    height = 1e6  # of w on the second axis, so that the shares move nothing there
    anchors = torch.tensor([[[0.0, math.log1p(-share) / height], [1.0, math.log(share) / height]]])
    w = torch.tensor([[0.0, height]], dtype=torch.float64)
    moments = Moments.at(w, anchors.double())
    exact = math.log(1 - share + share * math.exp(distance)) - share * distance
    return moments, exact


@pytest.mark.parametrize(
    ("share", "distance"),
    [(0.5, 0.001), (0.5, 0.05), (0.5, 400.0), (0.01, 3.0), (0.002, 5.0)],
    ids=["Bennett, near", "Hoeffding", "range", "Bennett", "Bennett, far"],
)
def test_the_bound_above_the_tangent_is_reached(share, distance):
    moments, exact = two_anchors(share, distance)
    bound = moments.above_tangent(torch.tensor([distance], dtype=torch.float64)).item()
    assert tight(exact, bound)
