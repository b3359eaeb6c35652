"""Certificates: exact where they claim it, never broken by a search, and tight."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from l2r.analysis.certificates.anchor_bounds import Moments
from l2r.analysis.certificates.attack import (
    count_violations,
    decision_gap,
    decisions,
    exact,
    find_flip,
    shortest_flip,
)
from l2r.analysis.certificates.certify import certified_share, certify, certify_first, holds_within
from l2r.analysis.certificates.routing_map import AnchorMap, LinearMap, routing_map
from l2r.routers import build_router
from l2r.routers.selection_rule import Selection
from tests.analysis.diagnostics.routers import EXPERTS, FORMS, HIDDEN, TOP_K, inputs, make
from tests.tiers import few

EXACT = [name for name in FORMS if "anchor" in name or name.startswith(("linear", "xmoe"))]
RANK_2 = ["dot", "cosine", "sips", "sips, no norm", "sips, batchnorm"]
SEVERAL = [*RANK_2, "sips, rank 4", "dot, rank 4", "cosine, rank 4"]


pytestmark = pytest.mark.usefixtures("coarse", "unchecked")
FEW = ("linear", "xmoe", "cosine", "sips", "sips, rank 4")  # each way to a radius
SEARCH = "a search with every form"


@pytest.mark.parametrize("name", FORMS)
def test_the_form_gives_the_router_its_decisions(name):
    router, x = exact(make(name)), inputs(200).double()
    form = routing_map(router)
    assert isinstance(form, LinearMap if name in EXACT else AnchorMap)
    chosen = form.logits(x).topk(TOP_K, dim=-1).indices
    assert torch.equal(chosen, router(x)[2])
    if isinstance(form, AnchorMap) and "cosine" not in name:
        torch.testing.assert_close(form.logits(x), router.logits(x))


@pytest.mark.parametrize("name", few(FORMS, FEW, SEARCH))
def test_no_search_breaks_a_certificate_and_none_beats_it(name):
    router, x = make(name), inputs(24)
    radii = certify(router, x)
    for top1, radius in ((True, radii.top1), (False, radii.topk)):
        assert (radius > 0).all()
        found = find_flip(router, x, top1=top1, starts=2, steps=4)
        assert (radius <= found).all()
        assert count_violations(router, x, radius, top1=top1, tries=5) == 0


@pytest.mark.parametrize("name", few(EXACT, ("linear", "sips, one anchor"), SEARCH))
def test_one_anchor_per_expert_is_certified_exactly(name):
    """In float64, whose rounding is far below the width of the search."""
    router, x = exact(make(name)), inputs(30).double()
    radii = certify(router, x)
    for top1, radius in ((True, radii.top1), (False, radii.topk)):
        ratio = radius / find_flip(router, x, top1=top1, starts=4, steps=8)
        assert ratio.max() <= 1
        assert (ratio > 0.9999).double().mean() > 0.75  # a search can miss the nearest flip


def test_linear_radius_equals_a_loop_over_pairs():
    router, x = exact(make("linear")), inputs(15).double()
    weight = router.weight.detach().double().numpy()
    for token, one, several in zip(x.double().numpy(), *_radii(router, x), strict=True):
        logits = weight @ token
        order = np.argsort(-logits)
        for keep, got in ((1, one), (TOP_K, several)):
            least = min(
                (logits[i] - logits[j]) / np.linalg.norm(weight[i] - weight[j])
                for i, j in itertools.product(order[:keep], order[keep:])
            )
            assert got == pytest.approx(least, rel=2e-6)


@pytest.mark.parametrize("name", few(["linear", "sips", "sips, rank 4"], ("linear",), SEARCH))
def test_the_tries_would_notice_a_radius_that_is_too_large(name):
    router, x = make(name), inputs(40)
    found = find_flip(router, x)
    assert count_violations(router, x, 1.02 * found, tries=20, steps=10) > 10


@pytest.mark.parametrize("name", ["linear", "sips"])
def test_the_shortest_of_many_changes_is_that_of_each_alone(name):
    router, x = exact(make(name)), inputs(20).double()
    inside = decisions(router, x, top1=True)
    generator = torch.Generator().manual_seed(1)
    changes = torch.randn(12, *x.shape, generator=generator, dtype=torch.float64)
    changes *= torch.logspace(-1, 1, 12, dtype=torch.float64)[:, None, None]

    def flips(change):
        return decision_gap(router.logits(x + change), inside) <= 0

    low, high = torch.zeros(12, 20, 1).double(), torch.ones(12, 20, 1).double()
    for _ in range(30):
        middle = (low + high) / 2
        flipped = torch.stack([flips(change) for change in middle * changes])[..., None]
        low, high = torch.where(flipped, low, middle), torch.where(flipped, middle, high)
    ends = torch.stack([flips(change) for change in changes])
    assert ends.any() and not ends.all()
    norms = torch.linalg.vector_norm(high * changes, dim=-1)
    expected = torch.where(ends, norms, torch.inf).amin(dim=0)

    change, size = shortest_flip(router, x, inside, changes, torch.inf)
    torch.testing.assert_close(size, expected, rtol=1e-8, atol=0)
    assert torch.equal(flips(change), torch.isfinite(size))
    limit = 1.5 * expected.nan_to_num(posinf=1.0)
    bounded = shortest_flip(router, x, inside, changes, limit)[1]
    torch.testing.assert_close(bounded, expected, rtol=1e-8, atol=0)


@pytest.mark.slow("a search")
@settings(deadline=None, max_examples=5)
@given(name=st.sampled_from(SEVERAL), seed=st.integers(0, 10**6), scale=st.sampled_from([0.1, 5.0]))
def test_certificates_hold_for_any_parameters_and_inputs(name, seed, scale):
    router, x = make(name, seed=seed), inputs(12, seed=seed, scale=scale)
    radii = certify(router, x)
    assert count_violations(router, x, radii.top1, tries=4, seed=seed) == 0
    assert count_violations(router, x, radii.topk, top1=False, tries=4, seed=seed) == 0


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), length=st.sampled_from([1e-4, 0.1, 1.0, 20.0]))
def test_logits_stay_between_their_tangent_and_its_bound(seed, length):
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randn(3, 5, 2, generator=generator, dtype=torch.float64)
    w = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    moments = Moments.at(w, anchors)
    step = length * nn.functional.normalize(torch.randn(30, 2, generator=generator).double(), dim=1)
    moved = Moments.at(w + step, anchors).logits
    tangent = moments.logits + torch.einsum("bnr,br->bn", moments.mean, step)
    above = moments.above_tangent(torch.full((30,), length * (1 + 1e-12), dtype=torch.float64))
    assert (moved >= tangent - 1e-12).all()
    assert (moved <= tangent + above + 1e-12).all()


def test_choosing_every_expert_can_never_change():
    radii = certify(make("sips", experts=3, top_k=3), inputs(5))
    assert torch.isinf(radii.topk).all()
    assert torch.isfinite(radii.top1).all()


def test_a_tie_has_no_radius():
    router = make("linear")
    with torch.no_grad():
        router.weight.copy_(torch.zeros_like(router.weight))
    radii = certify(router, inputs(4))
    assert (radii.top1 == 0).all()
    assert (radii.topk == 0).all()


def test_radii_scale_with_the_input_where_the_order_is_linear():
    for name in ("linear", "linear_sips", "sips, one anchor"):
        router, x = make(name), inputs(10)
        once, twice = certify(router, x), certify(router, 2 * x)
        torch.testing.assert_close(twice.top1, 2 * once.top1)


def test_batches_and_gradient_modes_do_not_matter(monkeypatch):
    router, x = make("sips, rank 4").train(), inputs(30)
    whole = certify(router, x)
    assert router.training
    monkeypatch.setattr("l2r.analysis.certificates.certify.PAIRS", 4 * EXPERTS**2)
    parts = certify(router, x)
    torch.testing.assert_close(parts.top1, whole.top1)
    assert not parts.top1.requires_grad


def test_each_chunk_of_tokens_is_held_against_its_own_distances(monkeypatch):
    router, x = make("sips, rank 4"), inputs(30)
    radii = certify(router, x).topk
    shares = torch.linspace(0.2, 0.999, len(x))[torch.randperm(len(x))]
    inside, outside = radii * shares, radii * (2 - shares)
    distance = torch.where(torch.arange(len(x)) % 3 == 0, outside, inside)
    whole = holds_within(router, x, distance)
    assert whole.any() and not whole.all()
    monkeypatch.setattr("l2r.analysis.certificates.certify.PAIRS", 4 * EXPERTS**2)
    assert torch.equal(holds_within(router, x, distance), whole)


class _Biased(nn.Module):
    """Chooses by logits plus a bias that the logits do not show, as DeepSeek-V3 does."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, x):
        logits = x @ self.weight.T
        indices = (logits + torch.tensor([9.0] + [0.0] * (EXPERTS - 1))).topk(2).indices
        return logits, logits.softmax(-1).gather(1, indices), indices


def test_routers_that_choose_otherwise_are_refused():
    with pytest.raises(ValueError, match="_Biased does not choose by its logits alone"):
        certify(_Biased(), inputs(50))
    with pytest.raises(ValueError, match="no routing map is known for Identity"):
        certify(nn.Identity(), inputs(5))


def test_a_selection_bias_is_refused_also_where_it_changes_no_choice_of_the_sample():
    """A radius is about inputs that the sample does not hold."""
    router, x = make("linear"), inputs(20)
    router.register_buffer("offset", torch.zeros(EXPERTS))
    unbiased = router(x).indices
    certify(router, x)
    router.selection = Selection(bias="offset")
    for value in (0.0, 1e-9):  # zeros, too: probabilities are ranked then, which may tie
        router.offset[0] = value
        assert torch.equal(router(x).indices, unbiased)
        with pytest.raises(ValueError, match="LinearRouter chooses by its logits and a selection"):
            certify(router, x)


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        (Selection(gate="sigmoid", groups=2, kept_groups=1), "groups of experts"),
        (Selection(gate="sigmoid", block_bias=True), "a bias of its block"),
    ],
)
def test_rules_that_may_choose_by_more_than_logits_are_refused_whatever_the_sample(rule, what):
    router = make("sips, rank 4")
    router.selection = rule
    for call in (certify, certify_first, lambda *given: holds_within(*given, torch.ones(20))):
        with pytest.raises(ValueError, match=f"L2RRouter chooses by its logits and {what}"):
            call(router, inputs(20))


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_a_cosine_is_floored_in_the_units_of_the_query_behind_its_norm(scale):
    """At eps 0.5 many queries are below it, where the score is no cosine any more."""
    for seed in range(3):
        torch.manual_seed(seed)
        sizes = {"hidden_size": HIDDEN, "num_experts": 4, "top_k": 2}
        router = build_router("l2r_cosine", **sizes, rank=3, heads=4, eps=0.5)
        x = scale * inputs(40)
        flips = find_flip(router, x, starts=2, steps=4)
        assert (flips >= certify(router, x).top1 * (1 - 1e-6)).all()


@pytest.mark.parametrize("name", ["sips", "sips, rank 4", "linear"])
def test_no_token_has_no_radius(name):
    router, none = make(name), inputs(20)[:0]
    assert certify(router, none).topk.shape == certify_first(router, none).shape == (0,)


def test_certified_share_counts_tokens_that_cover_the_noise():
    radii = torch.tensor([0.05, 0.2, 0.3, math.inf], dtype=torch.float64)
    assert certified_share(radii, sigma=0.05, hidden=16) == 0.75


def test_decisions_mark_the_first_expert_or_the_set():
    router, x = make("linear"), inputs(3)
    assert decisions(router, x, top1=True).sum(dim=1).tolist() == [1, 1, 1]
    assert decisions(router, x, top1=False).sum(dim=1).tolist() == [TOP_K] * 3


def _radii(router, x):
    radii = certify(router, x)
    return radii.top1.tolist(), radii.topk.tolist()
