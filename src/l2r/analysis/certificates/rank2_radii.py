"""Certified radii by geometry for rank 2: the distance of a token to the boundaries of its plane.

To change its decision a token must enter a cell that covers a boundary (rank2_cells.py), and
the least change of the router input that reaches a cell has a closed form: on a plane without
an RMSNorm, on a sphere with one (docs/diagnostics.md). The router's own arithmetic may move the
query as far as ``blur`` says, which the distances leave out.

Shape letters: C cells, T tokens, D hidden size, N experts, K angles.
"""

import dataclasses
import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from l2r.analysis.certificates.rank2_cells import Cells, boundary_cells, undecided
from l2r.analysis.certificates.routing_map import AnchorMap

ROUNDS = 120  # halvings of the NEAREST cells of each token, at most
NEAREST = 3
CLOSE = 5e-4  # relative distance from the radius to a change of decision that ends a search
_CHECK_INTERVAL = 3  # rounds from one look for such a change to the next
_TOKENS_PER_BATCH = 128  # tokens: what is halved for one seldom helps another


def plane_radii(form: AnchorMap, x: Float[Tensor, "T D"], keep: int) -> Float[Tensor, " T"]:
    """Certified radius of every token for its ``keep`` best experts; 0 inside a boundary cell.

    The NEAREST cells of a token are halved again until a place with other experts is known that
    is at most CLOSE farther away, but not more than ROUNDS times.
    """
    if len(x) == 0:
        return x.new_zeros(0, dtype=torch.float64)
    return torch.cat([_radii(form, part, keep) for part in torch.split(x, _TOKENS_PER_BATCH)])


def _radii(form: AnchorMap, x: Float[Tensor, "T D"], keep: int) -> Float[Tensor, " T"]:
    distance = _Distance.of(form, x)
    if distance is None:
        return x.new_zeros(len(x), dtype=torch.float64)
    query = form.query(x)
    # At q = 0 the direction jumps, and below the floor the form does not hold.
    floor = form.floors(x).max().item()
    zero = torch.zeros(1, dtype=torch.float64, device=x.device)
    origin = Cells(zero - math.pi, zero + math.pi, zero, zero + floor, zero > 0)
    sizes = torch.linalg.vector_norm(query, dim=1)
    cells = boundary_cells(form, keep, sizes).join(origin)
    own, cost = _chosen(form, query, keep), distance.to(cells)
    radii, changes = (torch.full_like(distance.angle, torch.inf) for _ in range(2))
    searched = torch.arange(len(x), device=x.device)
    for _ in range(ROUNDS // _CHECK_INTERVAL):
        for _ in range(_CHECK_INTERVAL):
            cells, cost = _refined(form, distance, cells, cost, keep)
        nearest = cells[cost.argmin(dim=1)]
        change = _nearest_change(form, distance, nearest, own, keep)
        changes[searched] = torch.minimum(changes[searched], change)
        radii[searched] = torch.minimum(cost.amin(dim=1), changes[searched])
        apart = radii[searched] < (1 - CLOSE) * changes[searched]
        apart &= nearest.divisible()
        if not apart.any():
            break
        searched, own, cost, distance = searched[apart], own[apart], cost[apart], distance[apart]
        matter = (cost <= changes[searched, None]).any(dim=0)
        cells, cost = cells[matter], cost[:, matter]
    return distance.without_blur(x, radii)


def _refined(
    form: AnchorMap, distance: "_Distance", cells: Cells, cost: Float[Tensor, "T C"], keep: int
) -> tuple[Cells, Tensor]:
    """Cells with the NEAREST of every token halved, and the distances of all."""
    rows = torch.unique(cost.topk(min(NEAREST, len(cells)), largest=False).indices)
    rows = rows[cells[rows].divisible()]
    finer = undecided(form, cells[rows].halves(), keep)
    rest = torch.ones(len(cells), dtype=torch.bool, device=cost.device)
    rest[rows] = False
    return cells[rest].join(finer), torch.cat([cost[:, rest], distance.to(finer)], dim=1)


def _nearest_change(
    form: AnchorMap, distance: "_Distance", cells: Cells, own: Bool[Tensor, "T N"], keep: int
) -> Float[Tensor, " T"]:
    """Distance of each token to a place of its cell [T] where other experts may be chosen.

    Of both sides of the cell and its middle the nearest such place; infinity if none is.
    """
    middle = (cells.angle_low + cells.angle_high) / 2
    angle = torch.stack([cells.angle_low, middle, cells.angle_high], dim=1)
    size = distance.nearest_size(angle)
    size = torch.minimum(torch.maximum(size, cells.size_low[:, None]), cells.size_high[:, None])
    query = size[..., None] * torch.stack([angle.cos(), angle.sin()], dim=-1)
    flat = query.flatten(0, 1)
    chosen = _chosen(form, flat, keep).view(*angle.shape, -1)
    same = (chosen == own[:, None]).all(dim=-1) & ~_may_round(form, flat, keep).view(angle.shape)
    return distance.to(Cells.points(angle, size)).masked_fill(same, torch.inf).amin(dim=1)


def _chosen(form: AnchorMap, query: Float[Tensor, "T R"], keep: int) -> Bool[Tensor, "T N"]:
    logits = form.scores(query).logsumexp(dim=-1)
    none = torch.zeros_like(logits, dtype=torch.bool)
    return none.scatter(1, logits.topk(keep, dim=1).indices, True)


def _may_round(form: AnchorMap, query: Float[Tensor, "T R"], keep: int) -> Bool[Tensor, " T"]:
    """Tell whether the rounding of logits could change the set of the ``keep`` best."""
    best = form.scores(query).logsumexp(dim=-1).topk(keep + 1, dim=1).values
    rounding = form.logit_rounding(torch.linalg.vector_norm(query, dim=1))
    return best[:, -2] - best[:, -1] < 2 * rounding


@dataclasses.dataclass(frozen=True)
class _Distance:
    """Least change of the router input that takes the query into a cell.

    Without an RMSNorm the row space of the matrix is a plane, and its distances are those of
    the input. With one, x / |x| lives on a sphere, of which the query sees two coordinates: the
    sizes are then polar angles, and ``scale`` times the sine of an angle is the distance.
    blur: distance in the row space by which rounding may move a query, on the sphere, or without
    an RMSNorm its share of |x|.
    """

    back: Tensor  # [2, 2], from q to the row space
    angle: Tensor  # [T]
    size: Tensor  # [T]
    scale: Tensor | None  # [T]
    sphere: float
    blur: Tensor  # []

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
        blur = form.query_rounding(torch.ones_like(singular[1])) / singular[1]
        return cls((left / singular).mT, angle, size, scale, sphere, blur)

    def without_blur(self, x: Tensor, radii: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
        """Radii around all tokens in which no query comes nearer to a cell than rounding reaches.

        With an RMSNorm the distances are such radii already.
        """
        if self.scale is not None:
            return radii
        size = torch.linalg.vector_norm(x.double(), dim=1)
        return ((radii - self.blur * size) / (1 + self.blur)).clamp_min(0)

    def __getitem__(self, tokens: Tensor) -> "_Distance":
        scale = None if self.scale is None else self.scale[tokens]
        return dataclasses.replace(
            self, angle=self.angle[tokens], size=self.size[tokens], scale=scale
        )

    def to(self, cells: Cells) -> Tensor:
        """Distance [T, C] of every token to every cell; infinity where it cannot be reached.

        Cells of shape [T, K] are each token's own.
        """
        center, half, low, high = _in_row_space(cells, self.back)
        turn = (_between(self.angle[:, None], center) - half).clamp_min(0)
        own = self.size[:, None]
        if self.scale is None:
            best = torch.minimum(torch.maximum(own * turn.cos(), low), high)
            side = 2 * (best * own).sqrt() * (turn / 2).sin()
            return torch.hypot(best - own, side)
        turn = (turn - _arc(self.blur, low)).clamp_min(0)
        low, high = (low - self.blur).clamp_min(0), high + self.blur
        reachable = low < self.sphere
        low, high = (torch.asin((size / self.sphere).clamp_max(1)) for size in (low, high))
        best = torch.atan2(own.sin() * turn.cos(), own.cos())
        best = torch.minimum(torch.maximum(best, low), high)
        haversine = ((best - own) / 2).sin().square()
        haversine = haversine + best.sin() * own.sin() * (turn / 2).sin().square()
        sine = torch.where(haversine < 0.5, 2 * (haversine * (1 - haversine)).sqrt(), 1.0)
        return torch.where(reachable, self.scale[:, None] * sine, torch.inf)

    def nearest_size(self, angle: Float[Tensor, "T K"]) -> Float[Tensor, "T K"]:
        """Size of q at which the ray of each angle comes nearest to the token."""
        point = _direction(angle) @ self.back.mT
        turn = _between(self.angle[:, None], torch.atan2(point[..., 1], point[..., 0]))
        own = self.size[:, None]
        size = own * turn.cos()
        if self.scale is not None:
            size = self.sphere * torch.atan2(own.sin() * turn.cos(), own.cos()).sin()
        return size.clamp_min(0) / torch.linalg.vector_norm(point, dim=-1)


def _in_row_space(cells: Cells, back: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Middle angle, half width and sizes of cells that contain the images of cells of q."""
    swing = (cells.angle_high - cells.angle_low) / 2
    angle = (cells.angle_low + cells.angle_high) / 2
    lowest, middle, highest = (
        torch.atan2(point[..., 1], point[..., 0])
        for point in (_direction(a) @ back.mT for a in (cells.angle_low, angle, cells.angle_high))
    )
    half = torch.maximum(_between(lowest, middle), _between(highest, middle)) + 1e-12
    half = torch.where(swing > 1, math.pi, half)
    size = torch.linalg.vector_norm(_direction(angle) @ back.mT, dim=-1)
    side = _direction(angle + math.pi / 2) @ back.mT
    side = torch.linalg.vector_norm(side, dim=-1) * swing.sin().abs()
    least = (size * swing.cos() - side).clamp_min(0)
    most = torch.where(swing > 1, torch.linalg.matrix_norm(back, 2), size + side)
    return middle, half, cells.size_low * least, cells.size_high * most


def _arc(distance: Tensor, size: Tensor) -> Tensor:
    """Largest angle between a point at ``size`` from 0 and one within ``distance`` of it."""
    return torch.where(size >= distance, torch.asin(distance / size.clamp_min(1e-300)), math.pi)


def _direction(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def _between(one: Tensor, other: Tensor) -> Tensor:
    """Absolute difference of angles, in [0, pi]."""
    return (torch.remainder(one - other + math.pi, 2 * math.pi) - math.pi).abs()
