"""A cover of the boundaries in the plane of a rank-2 router, by cells that are halved and narrowed.

A router of rank 2 decides in a plane. Its polar cells (angle of q, size of q) are halved until
the chosen experts are proven constant on each. What is left covers the boundaries: wherever the
chosen set changes, or the rounding of the router's logits could change it, a cell is. Of each cell only those angles and sizes are kept that the bounds
of its logits allow to a change, so that cells follow a boundary closely.

Shape letters: C cells, R rank (2), N experts, P pairs of an expert in the set and one outside.
"""

import dataclasses
import math

import torch
from jaxtyping import Float
from torch import Tensor

from l2r.analysis.certificates.anchor_bounds import Moments
from l2r.analysis.certificates.routing_map import AnchorMap

FAR = 1e30  # stands for an unbounded |q|
COARSE_CELLS = 500  # where halving everywhere ends
FINEST = 1e-9  # cells are not halved below this angle (radians) and relative size
_ROUNDING = 1e-11  # of float64 logits and their bounds, relative, with room to spare
_SLACK = 1e-12  # of angles that are kept
_WORK = 2**18  # entries of an array at once, so that they stay in a cache


@dataclasses.dataclass(frozen=True)
class Cells:
    """Polar cells of the plane of q: angles in radians, sizes of q, all [C].

    by_angle: whether halving the angle helps more than halving the size.
    """

    angle_low: Tensor
    angle_high: Tensor
    size_low: Tensor
    size_high: Tensor
    by_angle: Tensor

    @classmethod
    def points(cls, angle: Tensor, size: Tensor) -> "Cells":
        """Cells without extent, of any shape."""
        return cls(angle, angle, size, size, torch.zeros_like(angle, dtype=torch.bool))

    def __len__(self) -> int:
        return len(self.angle_low)

    def __getitem__(self, rows: Tensor | slice) -> "Cells":
        return Cells(*(getattr(self, f.name)[rows] for f in dataclasses.fields(self)))

    def halves(self) -> "Cells":
        """Every cell in two: at its middle angle, or at its middle size."""
        low, high = self.size_low, self.size_high
        inner = torch.where(low > 0, (low * high).sqrt(), high / 2)
        size = torch.where(high >= FAR, 2 * low.clamp_min(1e-3), inner)
        angle = (self.angle_low + self.angle_high) / 2
        first = dataclasses.replace(
            self,
            angle_high=torch.where(self.by_angle, angle, self.angle_high),
            size_high=torch.where(self.by_angle, high, size),
        )
        second = dataclasses.replace(
            self,
            angle_low=torch.where(self.by_angle, angle, self.angle_low),
            size_low=torch.where(self.by_angle, low, size),
        )
        return first.join(second)

    def divisible(self) -> Tensor:
        """Cells whose side that is to be halved is above FINEST; not the one at 0."""
        width = self.angle_high - self.angle_low
        long = self.size_high > self.size_low * (1 + FINEST)
        return torch.where(self.by_angle, width > FINEST, long) & (width < math.pi)

    def within(self, outer: "Cells") -> "Cells":
        """Part of every cell inside its cell of ``outer``; without one, size_low > size_high."""
        return Cells(
            torch.maximum(self.angle_low, outer.angle_low),
            torch.minimum(self.angle_high, outer.angle_high),
            torch.maximum(self.size_low, outer.size_low),
            torch.minimum(self.size_high, outer.size_high),
            self.by_angle,
        )

    def join(self, *others: "Cells") -> "Cells":
        """Cells of all."""
        names = [f.name for f in dataclasses.fields(self)]
        return Cells(*(torch.cat([getattr(c, n) for c in (self, *others)]) for n in names))


def boundary_cells(form: AnchorMap, keep: int, sizes: Float[Tensor, " T"]) -> Cells:
    """Cells that cover every place where the set of the ``keep`` best experts changes.

    ``sizes``: norms of the queries that matter, which place the first cut. The cells are a
    cover, never a sample: a place is left out only where the set is proven constant.
    """
    first = _first_cut(sizes if form.radial.slope(sizes).any() else sizes[:0])
    cells = undecided(form, first, keep)
    while len(cells) <= COARSE_CELLS:
        large = cells.divisible()
        if not large.any():
            break
        cells = cells[~large].join(undecided(form, cells[large].halves(), keep))
    return cells


def undecided(form: AnchorMap, cells: Cells, keep: int) -> Cells:
    """Cells on which the set is not proven constant, narrowed to the places where it may change.

    The given cells are narrower than half a turn.
    """
    experts, heads, _ = form.anchors.shape
    rows = max(1, _WORK // max(experts * heads, keep * (experts - keep)))
    parts = [
        _undecided(form, cells[slice(start, start + rows)], keep)
        for start in range(0, len(cells), rows)
    ]
    return cells[:0].join(*parts)


def _first_cut(sizes: Tensor) -> Cells:
    """64 angles, and 10 sizes around those given (one where |q| does not matter)."""
    angles = torch.linspace(-math.pi, math.pi, 65, dtype=torch.float64, device=sizes.device)
    used = sizes[sizes > 0]
    inner = angles[:0]
    if len(used) > 0:
        ends = math.log2(used.min().item() / 2), math.log2(used.max().item() * 2)
        inner = torch.logspace(*ends, 9, base=2, dtype=torch.float64, device=sizes.device)
    bounds = torch.cat([inner.new_zeros(1), inner, inner.new_full((1,), FAR)])
    angle, size = torch.meshgrid(torch.arange(64), torch.arange(len(bounds) - 1), indexing="ij")
    angle, size = angle.flatten(), size.flatten()
    halve_angle = torch.ones_like(angle, dtype=torch.bool, device=sizes.device)
    return Cells(angles[angle], angles[angle + 1], bounds[size], bounds[size + 1], halve_angle)


def _undecided(form: AnchorMap, cells: Cells, keep: int) -> Cells:
    ends = form.radial.value(cells.size_low), form.radial.value(cells.size_high)
    smallest, largest = torch.minimum(*ends), torch.maximum(*ends)
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

    # A place is middle + (s far_along, t far_across), with s and t in [-1, 1]. A pair of experts
    # can tie there only if s drift_along + t drift_across <= room.
    drift_along, drift_across = pairs(slope_along), pairs(slope_across)
    excess = above.gather(1, order)[:, None, keep:].expand(-1, keep, -1).flatten(1)
    rounding = _ROUNDING * (1 + moments.logits.abs().amax(dim=1, keepdim=True))
    rounding = rounding + 2 * form.logit_rounding(cells.size_high)[:, None]
    room = excess + rounding - pairs(moments.logits)
    reach = room + drift_along.abs() + drift_across.abs()
    tied = ~(reach < 0)  # true for NaN, too
    s_low, s_high = _span(drift_along, room + drift_across.abs(), tied)
    t_low, t_high = _span(drift_across, room + drift_along.abs(), tied)
    # What halving would shrink: the drift of that axis, and its part of the excess.
    worst = reach.argmax(dim=1, keepdim=True)
    part = far_across.square() / (far_across.square() + far_along.square()).clamp_min(1e-300)
    of_worst = excess.gather(1, worst)[:, 0]
    by_angle = drift_across.abs().gather(1, worst)[:, 0] + part * of_worst
    by_size = drift_along.abs().gather(1, worst)[:, 0] + (1 - part) * of_worst
    size_low, size_high = form.radial.sizes(
        middle + s_low * far_along, (middle + s_high * far_along) / swing.cos()
    )
    narrowed = Cells(
        angle + _turn(t_low * far_across, smallest, largest) - _SLACK,
        angle + _turn(t_high * far_across, largest, smallest) + _SLACK,
        size_low,
        size_high,
        by_angle * (t_high - t_low) >= by_size * (s_high - s_low),
    ).within(cells)
    return narrowed[tied.any(dim=1) & ~(narrowed.size_low > narrowed.size_high)]


def _span(drift: Tensor, room: Tensor, tied: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest t [C] in [-1, 1] with drift * t <= room for a pair that may tie [C, P]."""
    ratio = (room / drift.abs()).nan_to_num(1.0)
    ends = (torch.where(drift * side > 0, ratio, 1.0) for side in (-1, 1))
    low, high = (torch.where(tied, end, -1.0).amax(dim=1).clamp(-1, 1) for end in ends)
    return -low, high


def _turn(across: Tensor, if_negative: Tensor, if_positive: Tensor) -> Tensor:
    """Angle between the middle ray and a w at distance ``across`` from it, by the size of w."""
    size = torch.where(across < 0, if_negative, if_positive)
    return (across / size.clamp_min(1e-300)).clamp(-1, 1).asin()
