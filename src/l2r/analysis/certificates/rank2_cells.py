"""Certified radii by geometry for rank 2: the routing plane is cut into cells.

A router of rank 2 decides in a plane. Its polar cells (angle of q, size of q) are halved until
the chosen experts are proven constant on each, or the cell is too small to matter; what is
left covers the boundaries. To change its decision a token must enter such a cell, and the
least change of the router input that reaches a cell has a closed form: on a plane without an
RMSNorm, on a sphere with one (docs/diagnostics.md).

Shape letters: C cells, T tokens, D hidden size, N experts.

Longer than 250 lines: one derivation, from cells to radii.
"""

import dataclasses
import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from l2r.analysis.certificates.anchor_bounds import Moments
from l2r.analysis.certificates.routing_map import AnchorMap

FAR = 1e30  # stands for an unbounded |q|
COARSE_CELLS = 1_500  # where halving everywhere ends
FINEST = 1e-5  # cells are not halved below this angle (radians) and relative size
ROUNDS = 60  # halvings of the NEAREST cells of each token
NEAREST = 3
_ROUNDING = 1e-11  # of float64 logits and their bounds, relative, with room to spare
_WORK = 2**22  # entries held at once


@dataclasses.dataclass(frozen=True)
class Cells:
    """Polar cells of the plane of q: angles in radians [C], sizes of q [C]."""

    angle_low: Tensor
    angle_high: Tensor
    size_low: Tensor
    size_high: Tensor

    def __len__(self) -> int:
        return len(self.angle_low)

    def __getitem__(self, rows: Tensor | slice) -> "Cells":
        return Cells(*(getattr(self, f.name)[rows] for f in dataclasses.fields(self)))

    def halves(self, by_angle: Tensor) -> "Cells":
        """Every cell in two: at its middle angle, or at its middle size."""
        low, high = self.size_low, self.size_high
        inner = torch.where(low > 0, (low * high).sqrt(), high / 2)
        size = torch.where(high >= FAR, 2 * low.clamp_min(1e-3), inner)
        angle = (self.angle_low + self.angle_high) / 2
        first = dataclasses.replace(
            self,
            angle_high=torch.where(by_angle, angle, self.angle_high),
            size_high=torch.where(by_angle, high, size),
        )
        second = dataclasses.replace(
            self,
            angle_low=torch.where(by_angle, angle, self.angle_low),
            size_low=torch.where(by_angle, low, size),
        )
        return first.join(second)

    def divisible(self) -> Tensor:
        """Cells that are larger than FINEST in angle or in relative size; not the one at 0."""
        wide = self.angle_high - self.angle_low > FINEST
        long = self.size_high > self.size_low * (1 + FINEST)
        return (wide | long) & (self.angle_high - self.angle_low < math.pi)

    def join(self, other: "Cells") -> "Cells":
        """Cells of both."""
        names = [f.name for f in dataclasses.fields(self)]
        return Cells(*(torch.cat([getattr(self, n), getattr(other, n)]) for n in names))


def boundary_cells(
    form: AnchorMap, keep: int, sizes: Float[Tensor, " T"]
) -> tuple[Cells, Bool[Tensor, " C"]]:
    """Cells that cover every place where the set of the ``keep`` best experts changes.

    With them, for each, whether halving its angle helps more than halving its size.

    ``sizes``: norms of the queries that matter, which place the first cut. The cells are a
    cover, never a sample: a cell is dropped only when the set is proven constant on it.
    """
    cells = _start(sizes if form.radial.slope(sizes).any() else sizes[:0])
    while len(cells) <= COARSE_CELLS:
        unsure, by_angle = _examine(form, cells, keep)
        if not unsure.any():
            return cells[unsure], by_angle[unsure]
        cells = cells[unsure].halves(by_angle[unsure])
    unsure, by_angle = _examine(form, cells, keep)
    return cells[unsure], by_angle[unsure]


def plane_radii(form: AnchorMap, x: Float[Tensor, "T D"], keep: int) -> Float[Tensor, " T"]:
    """Certified radius of every token for its ``keep`` best experts; 0 inside a boundary cell.

    The NEAREST cells of each token are halved again ROUNDS times, so the cells become fine
    where they decide.
    """
    distance = _Distance.of(form, x)
    if distance is None:
        return x.new_zeros(len(x), dtype=torch.float64)
    sizes = torch.linalg.vector_norm(form.query(x), dim=1)
    cells, by_angle = boundary_cells(form, keep, sizes)
    # At q = 0 the direction jumps, and below the floor the form does not hold.
    floor = form.floor * (1 + 2 * form.rms(x).max().item())
    origin = torch.tensor([[-math.pi], [math.pi], [0.0], [floor]], dtype=torch.float64)
    cells = cells.join(Cells(*origin.to(x.device)))
    by_angle = torch.cat([by_angle, by_angle.new_zeros(1)])  # not divisible
    cost = distance.to(cells)
    for _ in range(ROUNDS):
        rows = torch.unique(cost.topk(min(NEAREST, len(cells)), largest=False).indices)
        rows = rows[cells[rows].divisible()]
        if len(rows) == 0:
            break
        finer = cells[rows].halves(by_angle[rows])
        unsure, finer_by_angle = _examine(form, finer, keep)
        finer = finer[unsure]
        rest = torch.ones(len(cells), dtype=torch.bool, device=x.device)
        rest[rows] = False
        cells = cells[rest].join(finer)
        by_angle = torch.cat([by_angle[rest], finer_by_angle[unsure]])
        cost = torch.cat([cost[:, rest], distance.to(finer)], dim=1)
    return cost.amin(dim=1)


@dataclasses.dataclass(frozen=True)
class _Distance:
    """Least change of the router input that takes the query into a cell.

    Without an RMSNorm the row space of the matrix is a plane, and its distances are those of
    the input. With one, x / |x| lives on a sphere, of which the query sees two coordinates: the
    sizes are then polar angles, and ``scale`` times the sine of an angle is the distance.
    """

    back: Tensor  # [2, 2], from q to the row space
    angle: Tensor  # [T]
    size: Tensor  # [T]
    scale: Tensor | None  # [T]
    sphere: float

    @classmethod
    def of(cls, form: AnchorMap, x: Tensor) -> "_Distance | None":
        left, singular, right = torch.linalg.svd(form.matrix, full_matrices=False)
        if singular[1] <= 1e-9 * singular[0]:
            return None
        rms = form.rms(x)
        place = x.double() @ right.mT / rms[:, None]
        angle, size = torch.atan2(place[:, 1], place[:, 0]), torch.linalg.vector_norm(place, dim=1)
        sphere, scale = x.shape[1] ** 0.5, None
        if form.norm_eps is not None:
            size, scale = torch.asin((size / sphere).clamp_max(1)), sphere * rms
        return cls((left / singular).mT, angle, size, scale, sphere)

    def to(self, cells: Cells) -> Tensor:
        """Distance [T, C] of every token to every cell; infinity where it cannot be reached."""
        center, half, low, high = _in_row_space(cells, self.back)
        turn = (_between(self.angle[:, None], center) - half).clamp_min(0)
        own = self.size[:, None]
        if self.scale is None:
            best = torch.minimum(torch.maximum(own * turn.cos(), low), high)
            side = 2 * (best * own).sqrt() * (turn / 2).sin()
            return torch.hypot(best - own, side)
        reachable = low < self.sphere
        low, high = (torch.asin((size / self.sphere).clamp_max(1)) for size in (low, high))
        best = torch.atan2(own.sin() * turn.cos(), own.cos())
        best = torch.minimum(torch.maximum(best, low), high)
        haversine = ((best - own) / 2).sin().square()
        haversine = haversine + best.sin() * own.sin() * (turn / 2).sin().square()
        sine = torch.where(haversine < 0.5, 2 * (haversine * (1 - haversine)).sqrt(), 1.0)
        return torch.where(reachable, self.scale[:, None] * sine, torch.inf)


def _start(sizes: Tensor) -> Cells:
    """A first cut: 64 angles, and 10 sizes around those given (one where |q| does not matter)."""
    angles = torch.linspace(-math.pi, math.pi, 65, dtype=torch.float64, device=sizes.device)
    used = sizes[sizes > 0]
    inner = angles[:0]
    if len(used) > 0:
        ends = math.log2(used.min().item() / 2), math.log2(used.max().item() * 2)
        inner = torch.logspace(*ends, 9, base=2, dtype=torch.float64, device=sizes.device)
    bounds = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), FAR)])
    angle, size = torch.meshgrid(torch.arange(64), torch.arange(len(bounds) - 1), indexing="ij")
    angle, size = angle.flatten(), size.flatten()
    return Cells(angles[angle], angles[angle + 1], bounds[size], bounds[size + 1])


def _examine(form: AnchorMap, cells: Cells, keep: int) -> tuple[Tensor, Tensor]:
    """Masks of the cells not proven constant, and of those where halving the angle helps more."""
    experts, heads, _ = form.anchors.shape
    rows = max(1, _WORK // max(experts * heads, keep * (experts - keep)))
    parts = [
        _examine_rows(form, cells[slice(start, start + rows)], keep)
        for start in range(0, len(cells), rows)
    ]
    if not parts:
        return cells.angle_low > 0, cells.angle_low > 0
    return torch.cat([unsure for unsure, _ in parts]), torch.cat([angle for _, angle in parts])


def _examine_rows(form: AnchorMap, cells: Cells, keep: int) -> tuple[Tensor, Tensor]:
    ends = form.radial.value(cells.size_low), form.radial.value(cells.size_high)
    largest = torch.maximum(*ends)
    middle = (ends[0] + ends[1]) / 2
    angle = (cells.angle_low + cells.angle_high) / 2
    swing = (cells.angle_high - cells.angle_low) / 2
    along = torch.stack([angle.cos(), angle.sin()], dim=1)
    across = torch.stack([-angle.sin(), angle.cos()], dim=1)
    # Every w of the cell is within these distances of the middle, along u and across it.
    far_along = (ends[0] - ends[1]).abs() / 2 + largest * swing.square() / 2
    far_across = largest * swing
    moments = Moments.at(middle[:, None] * along, form.anchors)
    order = moments.logits.argsort(dim=1, descending=True)
    above = moments.above_tangent(torch.hypot(far_along, far_across))
    slope_along = torch.einsum("cnr,cr->cn", moments.mean, along) * far_along[:, None]
    slope_across = torch.einsum("cnr,cr->cn", moments.mean, across) * far_across[:, None]

    def pairs(values: Tensor) -> Tensor:
        ranked = values.gather(1, order)
        return (ranked[:, :keep, None] - ranked[:, None, keep:]).flatten(1)

    drift_along, drift_across = pairs(slope_along).abs(), pairs(slope_across).abs()
    outside = above.gather(1, order)[:, None, keep:].expand(-1, keep, -1).flatten(1)
    bound = pairs(moments.logits) - drift_along - drift_across - outside
    worst = bound.argmin(dim=1, keepdim=True)
    # What halving would shrink: the drift of that axis, and its part of the excess.
    part = far_across.square() / (far_across.square() + far_along.square()).clamp_min(1e-300)
    excess = outside.gather(1, worst)[:, 0]
    by_angle = drift_across.gather(1, worst)[:, 0] + part * excess
    by_size = drift_along.gather(1, worst)[:, 0] + (1 - part) * excess
    rounding = _ROUNDING * (1 + moments.logits.abs().amax(dim=1))
    sure = bound.gather(1, worst)[:, 0] > rounding  # false for NaN, too
    return ~sure, by_angle >= by_size


def _in_row_space(cells: Cells, back: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Middle angle, half width and sizes of cells that contain the images of cells of q."""

    def direction(angle: Tensor) -> Tensor:
        return torch.stack([angle.cos(), angle.sin()], dim=1) @ back.mT

    swing = (cells.angle_high - cells.angle_low) / 2
    angle = (cells.angle_low + cells.angle_high) / 2
    lowest, middle, highest = (
        torch.atan2(point[:, 1], point[:, 0])
        for point in (direction(a) for a in (cells.angle_low, angle, cells.angle_high))
    )
    half = torch.maximum(_between(lowest, middle), _between(highest, middle)) + 1e-12
    half = torch.where(swing > 1, math.pi, half)
    size = torch.linalg.vector_norm(direction(angle), dim=1)
    side = torch.linalg.vector_norm(direction(angle + math.pi / 2), dim=1) * swing.sin().abs()
    least = (size * swing.cos() - side).clamp_min(0)
    most = torch.where(swing > 1, torch.linalg.matrix_norm(back, 2), size + side)
    return middle, half, cells.size_low * least, cells.size_high * most


def _between(one: Tensor, other: Tensor) -> Tensor:
    """Absolute difference of angles, in [0, pi]."""
    return (torch.remainder(one - other + math.pi, 2 * math.pi) - math.pi).abs()
