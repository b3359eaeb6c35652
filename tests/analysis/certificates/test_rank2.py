"""Rank 2: cells cover every boundary of the plane, and radii are near the exact ones."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from l2r.analysis.certificates import rank2_radii
from l2r.analysis.certificates.attack import exact, find_flip
from l2r.analysis.certificates.certify import certify
from l2r.analysis.certificates.query_magnitude import Identity, Saturated
from l2r.analysis.certificates.rank2_cells import FINEST, Cells, boundary_cells, undecided
from l2r.analysis.certificates.rank2_radii import CLOSE, plane_radii
from l2r.analysis.certificates.routing_map import AnchorMap, routing_map
from tests.analysis.diagnostics.routers import inputs, make
from tests.tiers import few

RANK_2 = ["dot", "cosine", "sips", "sips, no norm", "sips, batchnorm"]

pytestmark = pytest.mark.usefixtures("coarse", "unchecked")


@pytest.mark.parametrize("name", few(RANK_2, ("dot",), "a search with every form"))
def test_rank_two_is_near_the_smallest_flip(name, monkeypatch):
    monkeypatch.setattr(rank2_radii, "ROUNDS", 120)
    router, x = make(name), inputs(30)
    radii = certify(router, x)
    for top1, radius in ((True, radii.top1), (False, radii.topk)):
        ratio = radius / find_flip(router, x, top1=top1)
        assert ratio.mean() > 0.9
        assert ratio.median() > 0.99


@pytest.mark.parametrize("name", ["sips, no norm", "cosine"])
def test_rank_two_equals_a_scan_of_the_plane_when_the_input_is_the_plane(name, monkeypatch):
    """With hidden size 2 the input itself is the plane: every direction can be tried."""
    monkeypatch.setattr(rank2_radii, "ROUNDS", 120)
    router, x = make(name, hidden=2), inputs(3, hidden=2)
    wide, radius = exact(router), certify(router, x).top1
    angles = torch.linspace(0, 2 * math.pi, 361, dtype=torch.float64)[:-1]
    directions = torch.stack([angles.cos(), angles.sin()], dim=1)
    lengths = torch.linspace(0, 3, 301, dtype=torch.float64)[1:]
    for token, certified in zip(x.double(), radius, strict=True):
        points = token + lengths[:, None, None] * directions
        first = wide(points.reshape(-1, 2))[2][:, 0].view(len(lengths), -1)
        own = wide(token[None])[2][0, 0]
        flipped = (first != own).any(dim=1)
        scanned = lengths[flipped.int().argmax()] if flipped.any() else torch.tensor(3.0)
        assert certified <= scanned
        assert certified >= 0.95 * scanned - 0.01  # steps of the scan


@pytest.mark.parametrize("name", RANK_2)
def test_cells_cover_every_change_of_decision(name):
    form = routing_map(make(name))
    sizes = torch.linspace(0.2, 2, 9, dtype=torch.float64)
    for keep in (1, 2):
        changes = 0
        cells = boundary_cells(form, keep, sizes)
        angles = torch.linspace(-math.pi, math.pi, 4001, dtype=torch.float64)
        for size in sizes:
            query = size * torch.stack([angles.cos(), angles.sin()], dim=1)
            chosen = form.scores(query).logsumexp(-1).topk(keep).indices.sort().values
            for step in (chosen[1:] != chosen[:-1]).any(dim=1).nonzero()[:, 0]:
                inside = (cells.angle_low <= angles[step + 1]) & (cells.angle_high >= angles[step])
                inside &= (cells.size_low <= size) & (cells.size_high >= size)
                assert inside.any()
                changes += 1
        assert changes >= len(sizes)  # every circle around the origin meets several experts


def first_of(form, angle, size, keep):
    """Sorted experts chosen [B, keep] at polar places of the plane."""
    query = size[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return form.scores(query).logsumexp(-1).topk(keep).indices.sort().values


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(RANK_2),
    seed=st.integers(0, 10**6),
    width=st.sampled_from([1e-3, 0.09, 1.5]),
    stretch=st.sampled_from([1.001, 1.5, 20.0]),
    keep=st.sampled_from([1, 2]),
)
def test_a_narrowed_cell_still_has_every_change_of_decision(name, seed, width, stretch, keep):
    """On the way between two places with other experts bisection ends at a change."""
    form = routing_map(make(name, seed=seed % 100))
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    angle, size, pairs = 6 * random(20, 1) - 3, 3 * random(20, 1) + 0.05, (20, 40)
    low, high = (
        [(angle + random(*pairs) * width).flatten(), (size * stretch ** random(*pairs)).flatten()]
        for _ in range(2)
    )
    ends = (angle, angle + width, size, size * stretch)
    cells = Cells(*(end[:, 0] for end in ends), torch.ones(20, dtype=torch.bool))
    experts = first_of(form, *low, keep)
    differ = (first_of(form, *high, keep) != experts).any(dim=1).view(pairs)
    for _ in range(50):
        middle = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
        moved = (first_of(form, *middle, keep) != experts).any(dim=1)
        low = [torch.where(moved, a, m) for a, m in zip(low, middle, strict=True)]
        high = [torch.where(moved, m, b) for b, m in zip(high, middle, strict=True)]
    angles, sizes = (end.view(pairs) for end in high)
    for row in differ.any(dim=1).nonzero()[:, 0].tolist():
        left = undecided(form, cells[row : row + 1], keep)
        angle, size = angles[row, differ[row]], sizes[row, differ[row]]
        assert len(left) == 1
        assert left.angle_low <= angle.min() + 1e-13 and left.angle_high >= angle.max() - 1e-13
        assert left.size_low <= size.min() * (1 + 1e-13)
        assert left.size_high >= size.max() * (1 - 1e-13)


@settings(deadline=None, max_examples=200)
@given(
    turned=st.floats(-1.4, 1.4),
    width=st.floats(0.01, 1.5),
    share=st.floats(0.05, 0.95),
    stretch=st.floats(1.05, 8.0),
    part=st.floats(0.05, 0.95),
)
def test_a_cell_keeps_all_of_a_straight_boundary(turned, width, share, stretch, part):
    """Three equal anchors against two (the third is far below) tie on a line at log(3 / 2)."""
    line = torch.tensor([1.0, 0.0], dtype=torch.float64)
    anchors = torch.stack([torch.zeros(3, 2).double(), torch.stack([line, line, -300 * line])])
    form = AnchorMap(torch.eye(2).double(), anchors, Identity(), None, floor=1e-6)
    low, size = turned - share * width, math.log(1.5) / math.cos(turned) / stretch**part
    ends = [
        torch.tensor([v], dtype=torch.float64) for v in (low, low + width, size, size * stretch)
    ]
    left = undecided(form, Cells(*ends, torch.tensor([True])), 1)
    angle = torch.linspace(low, low + width, 2001, dtype=torch.float64)
    angle = angle[angle.abs() < 1.5]
    sizes = math.log(1.5) / angle.cos()
    inside = (sizes >= ends[2]) & (sizes <= ends[3])
    assert inside.any() and len(left) == 1
    least, most = angle[inside].aminmax()
    assert left.angle_low <= least + 1e-13 and left.angle_high >= most - 1e-13
    least, most = sizes[inside].aminmax()
    assert left.size_low <= least * (1 + 1e-13) and left.size_high >= most * (1 - 1e-13)


def test_narrowing_leaves_less_than_halving_could():
    """Halving leaves at least one half of a cell with a boundary."""
    form = routing_map(make("sips"))
    angle = torch.linspace(-math.pi, math.pi, 2001, dtype=torch.float64)
    ones = torch.ones(2000, dtype=torch.float64)
    cells = Cells(angle[:-1], angle[1:], 0.3 * ones, 0.31 * ones, ones > 0)
    left = undecided(form, cells, 1)
    area = ((left.angle_high - left.angle_low) * (left.size_high - left.size_low)).sum()
    whole = (angle[1] - angle[0]) * 0.01 * len(left)
    assert len(left) > 0 and area < whole / 2


@settings(deadline=None, max_examples=100)
@given(
    radial=st.sampled_from(
        [
            Identity(),
            Saturated(),
            Saturated(4.0, 0.5),
            Saturated(2.0, 1e-6),
            Saturated(1.0, 0.0),
            Saturated(1.0, 1.0, -1.7, 0.4),
            Saturated(3.0, 1.0, 2.0, -50.0),
            Saturated(3.0, 1.0, 0.0, 0.4),
        ]
    ),
    rho=st.floats(1e-6, 1e3),
)
def test_sizes_hold_every_query_of_that_magnitude(radial, rho):
    rho = torch.tensor([rho], dtype=torch.float64)
    low, high = radial.sizes(radial.value(rho), radial.value(rho))
    assert low <= rho <= high
    if radial.slope(rho).abs() > 0.1:
        assert high - low <= 1e-9 * rho.clamp_min(1)


@pytest.mark.parametrize("name", few(RANK_2, ("sips",), "a search with every form"))
def test_a_finished_search_is_within_close_of_a_longer_one(name, monkeypatch):
    """The radius is at least (1 - CLOSE) of a change that exists, so of any sound radius."""
    form, x = routing_map(make(name)), inputs(30)
    monkeypatch.setattr(rank2_radii, "ROUNDS", 120)
    radii = {keep: plane_radii(form, x, keep) for keep in (1, 2)}
    monkeypatch.setattr(rank2_radii, "ROUNDS", 300)
    monkeypatch.setattr(rank2_radii, "CLOSE", CLOSE / 20)
    for keep, radius in radii.items():
        longer = plane_radii(form, x, keep)
        assert (radius >= (1 - CLOSE) * longer).all()
        assert (longer >= (1 - CLOSE) * radius).all()


def test_a_token_on_a_boundary_has_no_radius(monkeypatch):
    """Its search ends where cells are as fine as they get."""
    monkeypatch.setattr(rank2_radii, "ROUNDS", 120)
    form = routing_map(make("sips, no norm", hidden=2))
    angle = torch.linspace(-math.pi, math.pi, 4001, dtype=torch.float64)
    first = first_of(form, angle, torch.ones_like(angle), 1)[:, 0]
    (steps,) = (first[1:] != first[:-1]).nonzero(as_tuple=True)
    low, high, size = angle[steps], angle[steps + 1], torch.ones(len(steps), dtype=torch.float64)
    own = first[steps]
    for _ in range(60):
        middle = (low + high) / 2
        moved = first_of(form, middle, size, 1)[:, 0] != own
        low, high = torch.where(moved, low, middle), torch.where(moved, middle, high)
    query = torch.stack([low.cos(), low.sin()], dim=1)
    x = torch.linalg.solve(form.matrix, query.mT).mT
    radii = plane_radii(form, x, 1)
    assert len(radii) > 1
    assert (radii <= 2 * FINEST * torch.linalg.vector_norm(x, dim=1)).all()
