"""Load balance in its four variants, z-loss and masks."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

from l2r.functional import (
    dead_experts,
    expert_counts,
    expert_usage,
    load_balancing_loss,
    mean_probs,
    peak_load,
    pool_anchors,
    router_margin_loss,
    router_z_loss,
    sequence_balance_loss,
)
from tests import reference
from tests.second_device import second_device


def layer(seed, tokens=20, experts=6, top_k=2):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=generator, dtype=torch.float64)
    return logits, logits.topk(top_k).indices


@pytest.mark.parametrize("variant", ["paper", "olmoe", "tutel"])
@given(seed=st.integers(0, 1000))
def test_balance_equals_loops(variant, seed):
    logits, indices = layer(seed)
    expected = reference.balance_loss(logits.numpy(), indices.numpy(), variant)
    assert load_balancing_loss(logits, indices, variant=variant).item() == pytest.approx(expected)


def test_the_first_choice_is_that_of_the_largest_logit_in_any_order_of_the_k():
    """Families of Hugging Face call topk with sorted=False."""
    logits, indices = layer(0)
    one, other = (
        load_balancing_loss(logits, k, variant="tutel") for k in (indices, indices.flip(1))
    )
    assert one == other


def test_layers_may_differ_in_experts_and_k():
    """The mean of each layer's own loss; pooled layers must have as many experts."""
    layers = [layer(0, experts=8, top_k=2), layer(1, experts=16, top_k=4), layer(2, top_k=1)]
    logits, indices = map(list, zip(*layers, strict=True))
    chosen = [k.shape[1] for k in indices]
    for one in (partial(load_balancing_loss, variant=v) for v in ("paper", "olmoe", "tutel")):
        each = [one(*own) for own in layers]
        torch.testing.assert_close(one(logits, indices), sum(each) / 3)
    each = [router_z_loss(z, variant="olmoe", top_k=k) for z, k in zip(logits, chosen, strict=True)]
    torch.testing.assert_close(router_z_loss(logits, variant="olmoe", top_k=chosen), sum(each) / 3)
    each = [router_margin_loss(z, top_k=k) for z, k in zip(logits, chosen, strict=True)]
    torch.testing.assert_close(router_margin_loss(logits, top_k=chosen), sum(each) / 3)
    with pytest.raises(ValueError, match=r"one number of experts; got \[6, 8, 16\]"):
        load_balancing_loss(logits, indices, variant="hf")
    with pytest.raises(ValueError, match="top_k must be one per layer; got 2 for 3"):
        router_margin_loss(logits, top_k=[1, 2])


def test_layers_may_lie_on_several_devices():
    """As device_map places them; the result is on the first one's."""
    (first, first_k), (second, second_k) = layer(0), layer(1)
    mask, rows = torch.arange(20) % 3 > 0, torch.arange(20) // 5

    def losses(logits, indices):
        for variant in ("paper", "olmoe", "hf", "tutel"):
            yield load_balancing_loss(logits, indices, variant=variant, mask=mask)
        yield sequence_balance_loss([z.softmax(1) for z in logits], indices, rows, mask=mask)
        yield router_z_loss(logits, mask=mask)
        yield router_margin_loss(logits, top_k=2, mask=mask)

    expected = list(losses([first, second], [first_k, second_k]))
    with second_device() as device:
        away = second.to(device), second_k.to(device)
        assert list(losses([first, away[0]], [first_k, away[1]])) == expected
        turned = losses([away[0], first], [away[1], first_k])
        assert all(loss.device == device for loss in turned)


@given(seed=st.integers(0, 1000))
def test_z_loss_equals_loops(seed):
    logits, _ = layer(seed)
    assert router_z_loss(logits).item() == pytest.approx(reference.z_loss(logits.numpy()))
    assert router_z_loss(logits, variant="olmoe", top_k=2).item() == pytest.approx(
        reference.z_loss(logits.numpy()) / 2
    )


@pytest.mark.parametrize(("top_k", "gap"), [(1, 0.1), (2, 0.1), (2, 1.0), (5, 0.5)])
@given(seed=st.integers(0, 1000))
def test_margin_loss_equals_loops(top_k, gap, seed):
    scores, _ = layer(seed)
    expected = reference.margin_loss(scores.numpy(), top_k, gap)
    found = router_margin_loss(scores, top_k=top_k, gap=gap).item()
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("layers", [1, 3])
def test_the_margin_loss_has_the_gradient_of_its_loops(layers):
    scores = [layer(seed)[0].requires_grad_() for seed in range(layers)]
    router_margin_loss(scores, top_k=2, gap=1.0).backward()
    step = 1e-6
    for part in scores:
        values, found = part.detach().numpy(), part.grad.numpy()
        for token, expert in [(t, n) for t in range(0, 20, 3) for n in range(6)]:
            high, low = values.copy(), values.copy()
            high[token, expert] += step
            low[token, expert] -= step
            both = [reference.margin_loss(v, 2, 1.0) for v in (high, low)]
            slope = (both[0] - both[1]) / (2 * step * layers)
            assert found[token, expert] == pytest.approx(slope, abs=1e-8)
        assert abs(found).max() > 1e-3


def test_the_margin_loss_does_not_fall_with_the_size_of_the_scores():
    scores, _ = layer(3)
    scores = scores * 10  # beside which 1e-6 in the variance is nothing
    scores.requires_grad_()
    loss = router_margin_loss(scores, top_k=2, gap=1.0)
    assert router_margin_loss(scores * 7 + 3, top_k=2, gap=1.0).item() == pytest.approx(loss.item())
    loss.backward()
    # by Euler's theorem the gradient has no part along the scores
    assert (scores.grad * scores).sum().item() == pytest.approx(0, abs=1e-6)
    assert scores.grad.abs().max() > 0


def test_margins_from_the_gap_on_cost_nothing_and_equal_scores_one():
    wide = torch.tensor([[3.0, 2.0, -4.0, -5.0]], dtype=torch.float64, requires_grad=True)
    loss = router_margin_loss(wide, top_k=2, gap=1.0)
    loss.backward()
    assert loss.item() == 0 and not wide.grad.any()
    equal = torch.zeros(2, 4, requires_grad=True)
    loss = router_margin_loss(equal, top_k=2)
    loss.backward()
    assert loss.item() == 1 and equal.grad.isfinite().all()


def test_masked_tokens_have_no_margin():
    scores, _ = layer(5)
    mask = torch.arange(26) < 20
    padded = torch.cat([scores, torch.full((6, 6), 1e3, dtype=torch.float64)]).requires_grad_()
    loss = router_margin_loss(padded, top_k=2, gap=1.0, mask=mask.view(2, 13))
    torch.testing.assert_close(loss, router_margin_loss(scores, top_k=2, gap=1.0))
    loss.backward()
    assert not padded.grad[20:].any() and padded.grad[:20].any()


@pytest.mark.parametrize("heads", [1, 4])
def test_the_centered_z_loss_is_zero_where_every_anchor_scores_zero(heads):
    logits = pool_anchors(torch.zeros(5, 6, heads, dtype=torch.float64))
    assert router_z_loss(logits, variant="centered", heads=heads).item() == pytest.approx(0)
    moved = router_z_loss(logits + 0.5, variant="centered", heads=heads)
    assert moved.item() == pytest.approx(0.25)


def test_every_layer_has_its_own_center():
    layers = [layer(0)[0], layer(1)[0]]
    apart = [
        router_z_loss(z, variant="centered", heads=h) for z, h in zip(layers, (1, 3), strict=True)
    ]
    both = router_z_loss(layers, variant="centered", heads=[1, 3])
    torch.testing.assert_close(both, torch.stack(apart).mean())
    with pytest.raises(ValueError, match="heads must be one per layer; got 1 for 2"):
        router_z_loss(layers, variant="centered", heads=[1])


def test_hf_variant_equals_transformers():
    layers = [layer(seed) for seed in range(3)]
    ours = load_balancing_loss([z for z, _ in layers], [i for _, i in layers], variant="hf")
    theirs = load_balancing_loss_func(tuple(z.float() for z, _ in layers), 6, 2)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_perfect_balance_has_the_documented_values():
    experts, top_k = 8, 2
    logits = torch.zeros(experts, experts)
    indices = torch.stack([torch.arange(experts), (torch.arange(experts) + 1) % experts], dim=1)
    values = {"paper": top_k, "hf": top_k, "olmoe": 1, "tutel": 1}
    for variant, value in values.items():
        assert load_balancing_loss(logits, indices, variant=variant).item() == pytest.approx(value)


def test_layers_that_collapse_differently_look_balanced_to_hf_alone():
    one_hot = torch.eye(4) * 100
    logits = [one_hot[i].repeat(12, 1) for i in range(4)]
    indices = [torch.full((12, 1), i) for i in range(4)]
    assert load_balancing_loss(logits, indices, variant="hf").item() == pytest.approx(1)
    assert load_balancing_loss(logits, indices, variant="paper").item() == pytest.approx(4)


@pytest.mark.parametrize("variant", ["paper", "olmoe", "hf", "tutel"])
def test_masked_tokens_change_nothing(variant):
    logits, indices = layer(5)
    mask = torch.ones(26, dtype=torch.bool)
    mask[20:] = False
    padded = torch.cat([logits, torch.full((6, 6), 1e3, dtype=torch.float64)])
    padded_indices = torch.cat([indices, torch.zeros(6, 2, dtype=torch.long)])
    plain = load_balancing_loss(logits, indices, variant=variant)
    masked = load_balancing_loss(padded, padded_indices, variant=variant, mask=mask)
    torch.testing.assert_close(masked, plain)
    torch.testing.assert_close(router_z_loss(padded, mask=mask), router_z_loss(logits))


def test_masked_tokens_may_be_nan():
    logits, indices = layer(5)
    mask = torch.arange(26) < 20
    lost = torch.cat([logits, torch.full((6, 6), math.nan, dtype=torch.float64)]).requires_grad_()
    padded = torch.cat([indices, torch.zeros(6, 2, dtype=torch.long)])
    for loss in (
        partial(load_balancing_loss, indices=padded),
        router_z_loss,
        partial(router_margin_loss, top_k=2, gap=1.0),
    ):
        (grad,) = torch.autograd.grad(loss(lost, mask=mask), lost)
        torch.testing.assert_close(
            loss(lost, mask=mask), loss(torch.where(mask[:, None], lost.detach(), 0), mask=mask)
        )
        assert grad.isfinite().all() and not grad[20:].any()


def test_gradient_reaches_the_logits_and_is_exact():
    logits, indices = layer(7)
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: load_balancing_loss(z, indices), (logits,))
    assert torch.autograd.gradcheck(router_z_loss, (logits,))
    assert torch.autograd.gradcheck(lambda z: router_margin_loss(z, top_k=2, gap=1.0), (logits,))


def test_usage_and_shares_sum_to_k_and_one():
    logits, indices = layer(9)
    assert expert_usage(indices, 6).sum().item() == pytest.approx(2)
    assert mean_probs(logits).sum().item() == pytest.approx(1)


@pytest.mark.parametrize("variant", ["paper", "olmoe", "hf", "tutel"])
def test_given_usage_replaces_the_layers_own_in_every_variant(variant):
    (one, first), (two, second) = layer(1), layer(2)
    usage = [torch.rand(6, dtype=torch.float64) for _ in range(2)]
    shares = [logits.softmax(dim=1).mean(dim=0) for logits in (one, two)]
    expected = 6 * sum((s * f).sum() for s, f in zip(shares, usage, strict=True)) / 2
    if variant == "hf":
        expected = 6 * (sum(shares) / 2 * sum(usage) / 2).sum()
    if variant == "olmoe":
        expected = expected / 2  # k
    found = load_balancing_loss([one, two], [first, second], variant=variant, usage=usage)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda z, i: load_balancing_loss(z, i, variant="switch"), "variant must be one of paper"),
        (lambda z, i: load_balancing_loss([z, z], [i]), "lists of one length"),
        (lambda z, i: load_balancing_loss(z, i, mask=torch.ones(3)), "one entry per token"),
        (lambda z, i: router_z_loss(z, variant="olmoe"), "top_k is needed"),
        (lambda z, i: router_margin_loss(z, top_k=6), "top_k must be between 1 and 5 .* top_k=6"),
        (lambda z, i: router_margin_loss(z, top_k=2, gap=0.0), "gap must be > 0 .* gap=0.0"),
        (lambda z, i: router_z_loss(z, variant="x"), "variant must be one of paper, olmoe"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(*layer(1))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("variant", ["paper", "olmoe", "hf", "tutel"])
def test_autocast_changes_neither_losses_nor_gradients(variant, masked):
    tokens, experts = 512, 16
    logits, indices = layer(13, tokens, experts)
    mask = torch.arange(tokens) % 3 > 0 if masked else None

    def both(z):
        z = z.requires_grad_()
        balance = load_balancing_loss(z, indices, variant=variant, mask=mask)
        loss = torch.stack([balance, router_z_loss(z, mask=mask)])
        return loss, torch.autograd.grad(balance + loss[1], z)[0]

    loss, gradient = both(logits.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, gradient_under = both(logits.float())
    exact, exact_gradient = both(logits)
    assert under.dtype == gradient_under.dtype == torch.float32
    # sums of `tokens` terms, each rounded a few times; bf16 would be 2**16 times as coarse
    room = 4 * tokens * torch.finfo(torch.float32).eps
    for found in (loss, under):
        torch.testing.assert_close(found.double(), exact, rtol=room, atol=0)
    scale = exact_gradient.abs().max()
    for found in (gradient, gradient_under):
        assert (found.double() - exact_gradient).abs().max() <= room * scale


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("variant", ["paper", "olmoe", "hf", "tutel"])
def test_losses_do_not_depend_on_the_default_dtype(variant, default):
    """Lightning's bf16-true and others build and train under a half-precision default."""
    logits, indices = (part.float() if part.is_floating_point() else part for part in layer(0))
    mask = torch.arange(20) % 3 > 0
    expected = [
        load_balancing_loss(logits, indices, variant=variant, mask=mask),
        load_balancing_loss(logits, indices, variant=variant),
        router_z_loss(logits, mask=mask),
        router_z_loss(logits),
    ]
    torch.set_default_dtype(default)
    try:
        losses = [
            load_balancing_loss(logits, indices, variant=variant, mask=mask),
            load_balancing_loss(logits, indices, variant=variant),
            router_z_loss(logits, mask=mask),
            router_z_loss(logits),
        ]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))


def test_dead_experts_and_the_peak_are_of_counts_and_shares_alike():
    counts = expert_counts(torch.tensor([[0, 2], [0, 3], [0, 2]]), 5)
    assert counts.tolist() == [3, 0, 2, 1, 0]
    for load in (counts, counts.double(), counts.double() / 3):
        assert dead_experts(load) == 2
    assert peak_load(counts) == 3 / (6 / 5) == peak_load(counts.double() / 3)
    assert peak_load(torch.ones(4)) == 1 and dead_experts(torch.ones(4)) == 0
