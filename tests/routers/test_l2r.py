"""Anchors spread evenly: exact angles in the plane, far apart elsewhere, one draw per seed.

And what a decoding step costs.
"""

import math
import os
import sys

import pytest
import torch

from l2r import build_router
from l2r.kernels.native.build import library

SIZES = {"hidden_size": 32, "num_experts": 8, "top_k": 2}


def anchors(**options):
    return build_router("l2r_sips", **SIZES, **options).anchors.detach()


def nearest(points):
    """Angle of every point to its nearest other, smallest first."""
    cosines = (points @ points.T).fill_diagonal_(-1).clamp(-1, 1)
    return cosines.amax(dim=1).acos().sort().values


@pytest.mark.parametrize("heads", [1, 3, 4])
def test_angles_in_the_plane_are_even_over_all_and_inside_every_expert(heads):
    found = anchors(rank=2, heads=heads, anchor_init="even")
    turns = torch.atan2(found[..., 1], found[..., 0]).double() / (2 * math.pi) % 1
    for group, count in [(turns.flatten(), 8 * heads), *((row, heads) for row in turns)]:
        ordered = group.sort().values
        gaps = torch.diff(ordered, append=ordered[:1] + 1)
        torch.testing.assert_close(gaps, torch.full_like(gaps, 1 / count), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("rank", "heads"), [(3, 4), (8, 1), (8, 4), (32, 2)])
def test_elsewhere_they_are_further_apart_than_drawn_ones(rank, heads):
    torch.manual_seed(1)
    even, drawn = (anchors(rank=rank, heads=heads, anchor_init=how) for how in ("even", "drawn"))
    assert even.shape == drawn.shape == (8, heads, rank)
    torch.testing.assert_close(even.norm(dim=-1), torch.ones(8, heads))
    assert nearest(even.flatten(0, 1))[0] > 1.3 * nearest(drawn.flatten(0, 1))[0]
    if heads > 1:
        own = [min(nearest(row)[0] for row in found) for found in (even, drawn)]
        assert own[0] > own[1]


def test_one_dimension_has_two_directions_that_take_turns():
    found = anchors(rank=1, heads=2, anchor_init="even").squeeze(-1)
    assert found.abs().eq(1).all() and found.sum(0).eq(0).all() and found.sum(1).eq(0).all()


@pytest.mark.parametrize("kind", ["l2r_dot", "l2r_cosine", "l2r_sips", "linear_sips"])
def test_the_seed_decides_and_nothing_else(kind):
    def drawn(seed):
        torch.manual_seed(seed)
        return build_router(kind, **SIZES, anchor_init="even").anchors

    assert torch.equal(drawn(0), drawn(0)) and not torch.equal(drawn(0), drawn(1))


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
def test_a_decoding_step_makes_few_python_calls(unchecked: None) -> None:
    """Each costs a microsecond or more in a model whose layers have emptied the caches."""
    router = build_router("l2r_sips", hidden_size=16, num_experts=8, top_k=2).eval()
    x, calls = torch.randn(1, 16), []

    def note(frame, event: str, _: object) -> None:
        if event == "call" and f"{os.sep}l2r{os.sep}" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    with torch.no_grad():
        for _ in range(2):
            router(x)
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            router(x)
        finally:
            sys.setprofile(before)
    assert 5 < len(calls) <= 8, calls
