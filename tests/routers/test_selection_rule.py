"""Selections against a float64 reference written as loops over tokens and experts."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from l2r import build_router
from l2r.kernels import dispatch
from l2r.routers.observe import routed
from l2r.routers.selection_rule import Selection


class Stub(nn.Module):
    """What a selection reads from a router."""

    def __init__(self, top_k: int, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.top_k = top_k
        self.held = SimpleNamespace(bias=bias)


def _reference(logits, top_k, selection, bias):
    """One token after another, one expert after another, in float64."""
    all_weights, all_indices = [], []
    for row in logits:
        if selection.gate == "softmax":
            shifted = [np.exp(z - max(row)) for z in row]
            scores = [e / sum(shifted) for e in shifted]
        elif selection.gate == "sqrtsoftplus":
            scores = [np.sqrt(np.log(1 + np.exp(z))) for z in row]
        else:
            scores = [1 / (1 + np.exp(-z)) for z in row]
        ranked = row if selection.biased == "logits" and bias is not None else scores
        ranking = [s + (0.0 if bias is None else bias[n]) for n, s in enumerate(ranked)]
        size = len(row) // selection.groups
        quality = []
        for g in range(selection.groups):
            members = sorted(ranking[g * size : (g + 1) * size], reverse=True)
            quality.append(sum(members[: selection.group_best]))
        kept = sorted(range(selection.groups), key=lambda g: -quality[g])[: selection.kept_groups]
        left = [r if n // size in kept else selection.dropped for n, r in enumerate(ranking)]
        chosen = sorted(range(len(row)), key=lambda n: -left[n])[:top_k]
        weights = [scores[n] for n in chosen]
        if selection.normalize:
            weights = [w / (sum(weights) + selection.norm_eps) for w in weights]
        all_weights.append([w * selection.scale for w in weights])
        all_indices.append(chosen)
    return np.array(all_weights), np.array(all_indices)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    gate=st.sampled_from(["softmax", "sigmoid", "sqrtsoftplus"]),
    normalize=st.booleans(),
    with_bias=st.booleans(),
    biased=st.sampled_from(["scores", "logits"]),
    dropped=st.sampled_from([-np.inf, 0.0]),
    groups=st.sampled_from([(1, 1, 2), (2, 1, 2), (4, 2, 1), (4, 3, 2)]),
    top_k=st.integers(1, 4),
)
def test_a_selection_equals_the_loop(
    *, seed, gate, normalize, with_bias, biased, dropped, groups, top_k
):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 16, generator=generator, dtype=torch.float64) * 2
    bias = torch.randn(16, generator=generator, dtype=torch.float64) if with_bias else None
    selection = Selection(
        gate=gate,
        normalize=normalize,
        norm_eps=1e-6,
        scale=2.5,
        groups=groups[0],
        kept_groups=groups[1],
        group_best=groups[2],
        dropped=dropped,
        biased=biased if with_bias else "scores",
        block_bias=True,
    )
    weights, indices = selection(Stub(top_k), logits, bias)
    expected, chosen = _reference(
        logits.numpy(), top_k, selection, None if bias is None else bias.numpy()
    )
    np.testing.assert_array_equal(indices.numpy(), chosen)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-12)


def test_a_bias_held_by_the_router_is_found_by_its_path_and_replaces_the_passed_one():
    logits = torch.zeros(3, 4)
    selection = Selection(gate="sigmoid", bias="held.bias", block_bias=True)
    router = Stub(1, bias=torch.tensor([[0.0, 0.0, 9.0, 0.0]]))
    weights, indices = selection(router, logits, torch.tensor([9.0, 0.0, 0.0, 0.0]))
    assert indices.flatten().tolist() == [2, 2, 2]
    assert weights.flatten().tolist() == [0.5, 0.5, 0.5]  # the bias is not in the weights


def test_a_normalized_softmax_is_the_softmax_of_the_chosen_logits():
    logits = torch.tensor([[3.0, -1.0, 2.0, 0.0]], dtype=torch.float64)
    weights, indices = Selection(normalize=True)(Stub(2), logits)
    assert indices.tolist() == [[0, 2]]
    e = np.exp([3.0, 2.0])
    np.testing.assert_allclose(weights.numpy()[0], e / e.sum(), rtol=1e-12)


def test_the_bias_of_a_block_is_used_where_the_selection_says_so():
    logits, bias = torch.eye(4)[:1], torch.tensor([0.0, 0.0, 9.0, 0.0])
    for gate in ("softmax", "sigmoid"):
        used = Selection(gate=gate, block_bias=True)(Stub(1), logits, bias)[1]
        ignored = Selection(gate=gate)(Stub(1), logits, bias)[1]
        assert (used.item(), ignored.item()) == (2, 0)


@pytest.mark.parametrize("kind", ["l2r_sips", "xmoe"])
@pytest.mark.parametrize(
    ("selection", "calls"),
    [
        (Selection(), {"route"}),
        (Selection(normalize=True, family="mixtral"), {"route"}),
        (Selection(gate="sigmoid"), {"route_logits"}),
        (Selection(scale=2.0), {"route_logits"}),
        (Selection(block_bias=True), {"route_logits"}),
        (Selection(groups=2, kept_groups=1), {"route_logits"}),
    ],
    ids=str,
)
def test_usual_selections_are_one_call_and_all_logits_are(monkeypatch, kind, selection, calls):
    router = build_router(kind, hidden_size=12, num_experts=6, top_k=2)
    router.selection = selection
    seen = set()
    for name in ("route", "route_logits", "routing_query", "anchor_logits"):
        call = getattr(dispatch, name)

        def spy(*args, name=name, call=call, **kwargs):
            seen.add(name)
            return call(*args, **kwargs)

        monkeypatch.setattr(dispatch, name, spy)
    x = torch.randn(5, 12)
    logits, weights, indices = router(x)
    assert seen == calls
    expected, chosen = selection(router, router.logits(x), None)
    assert torch.equal(indices, chosen)
    torch.testing.assert_close(weights, expected)
    assert torch.equal(logits, router.logits(x))


def test_a_subclass_is_never_taken_for_the_usual_selection():
    class First(Selection):
        def __call__(self, router, logits, bias=None):
            indices = torch.zeros(logits.shape[0], router.top_k, dtype=torch.long)
            return torch.ones(indices.shape), indices

    router = build_router("l2r_sips", hidden_size=12, num_experts=6, top_k=2)
    router.selection = First()
    assert router(torch.randn(5, 12)).indices.sum() == 0


def test_a_selection_prints_what_differs_from_the_usual_one():
    assert repr(Selection(normalize=True, family="olmoe")) == (
        "Selection(normalize=True, family='olmoe')"
    )


def test_top_1_with_weights_of_one_stays_possible_for_a_family():
    router = build_router("l2r_sips", hidden_size=12, num_experts=6, top_k=1)
    router.selection = Selection(normalize=True, family="mixtral")
    output = router(torch.randn(5, 12))
    assert torch.equal(output.weights, torch.ones(5, 1))
    output.weights.sum().backward()
    assert router.anchors.grad.abs().max() == 0


def test_groups_are_ranked_by_their_two_best_unless_told_otherwise():
    """The second group has the best expert, the first the best pair."""
    scores = torch.tensor([[0.6, 0.6, 0.9, 0.1]]).logit()
    router = Stub(top_k=1)
    usual = Selection(gate="sigmoid", groups=2, kept_groups=1)
    assert usual(router, scores)[1].tolist() == [[0]]
    assert dataclasses.replace(usual, group_best=1)(router, scores)[1].tolist() == [[2]]


def test_an_output_with_fewer_weights_than_indices_is_no_routers():
    logits, few, indices = torch.zeros(3, 4), torch.zeros(3, 1), torch.zeros(3, 2).long()
    for weights in (few, torch.zeros(3, 3)):
        with pytest.raises(ValueError, match=r"weights \[T, K\] and indices"):
            routed(torch.nn.Identity(), (logits, weights, indices))


@pytest.mark.parametrize("kind", ["l2r_sips", "l2r_dot", "l2r_cosine"])
def test_logits_are_divided_by_the_temperature(kind):
    sizes = {"hidden_size": 8, "num_experts": 4, "top_k": 2, "rank": 3, "heads": 2}
    one, hot = (build_router(kind, **sizes, temperature=t).double() for t in (1.0, 0.4))
    hot.load_state_dict(one.state_dict())
    x = torch.randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(hot(x).logits, one(x).logits / 0.4, rtol=1e-12, atol=1e-14)


def test_borders_of_options():
    sizes = {"hidden_size": 8, "num_experts": 4, "top_k": 2}
    router = build_router("perturbed_cosine", **sizes, rank=1)
    assert router(torch.randn(3, 8)).logits.isfinite().all()
    with pytest.raises(ValueError, match="anchor_norm must be None or > 0"):
        build_router("xmoe", **sizes, anchor_norm=0.0)


def test_weights_of_unlikely_experts_that_a_bias_chose_are_numbers_that_sum_to_one():
    """exp(-200) is 0 in fp32 beside exp(0), and so would be the sum of both."""
    logits = torch.tensor([[200.0, 1.0, 0.0, 0.0]], requires_grad=True)
    selection = Selection(normalize=True, block_bias=True)
    weights, indices = selection(Stub(2), logits, torch.tensor([-9.0, 9.0, 8.0, 0.0]))
    assert indices.tolist() == [[1, 2]]
    torch.testing.assert_close(weights, torch.softmax(torch.tensor([[1.0, 0.0]]), dim=1))
    weights[0, 0].backward()
    assert logits.grad.isfinite().all() and logits.grad[0, 1] > 0


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_biased_choice_is_weighed_as_in_a_replay(gate, normalize):
    selection = Selection(gate=gate, normalize=normalize, block_bias=True, scale=1.5)
    torch.manual_seed(0)
    logits, bias = 3 * torch.randn(50, 8), torch.randn(8)
    weights, indices = selection(Stub(3), logits, bias)
    assert torch.equal(selection.weigh(Stub(3), logits, indices), weights)


def test_the_ranking_is_what_the_chosen_experts_are_best_by():
    logits = torch.randn(20, 8)
    for selection, bias in [
        (Selection(), None),
        (Selection(gate="sigmoid", scale=2.0), None),
        (Selection(gate="sigmoid", bias="held.bias"), torch.randn(8)),
    ]:
        router = Stub(3, bias)
        _, chosen = selection(router, logits)
        ranking = selection.ranking(router, logits)
        assert torch.equal(ranking.topk(3).indices.sort().values, chosen.sort().values)


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        (Selection(block_bias=True), "a selection by a bias of the block has no margin"),
        (Selection(groups=4, kept_groups=2), "a selection by groups of experts has no margin"),
        (
            dataclasses.make_dataclass(
                "Own", [], bases=(Selection,), frozen=True,
                namespace={"__call__": lambda self, router, logits, bias=None: None},
            )(),
            "Own must define ranking",
        ),
    ],
)  # fmt: skip
def test_a_selection_without_scores_to_rank_is_refused_a_margin(selection, message):
    with pytest.raises(ValueError, match=message):
        selection.ranking(Stub(2), torch.randn(3, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate": "softplus"}, "gate must be softmax, sigmoid or sqrtsoftplus; got 'softplus'"),
        ({"biased": "weights"}, "biased must be scores or logits; got 'weights'"),
        ({"groups": 0}, "groups must be >= 1; got 0"),
        ({"kept_groups": 0}, "kept_groups must be >= 1"),
        ({"group_best": -1}, "group_best must be >= 1"),
        ({"scale": float("nan")}, "scale must be finite"),
        ({"norm_eps": -1e-6}, "norm_eps >= 0"),
        ({"norm_min": float("inf")}, "norm_min must be finite"),
    ],
)
def test_impossible_options_are_refused(options, message):
    selection = Selection()
    vars(selection).update(options)  # the shape checks of tests would refuse a gate before
    with pytest.raises(ValueError, match=message):
        selection.__post_init__()
