"""Routers beyond the paper, each against its source's formula written as loops in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from l2r import build_router
from l2r.functional import expert_counts, expert_usage
from l2r.routers import RouterConfig, router_names
from l2r.routers.count import router_parameters
from l2r.routers.selection_bias import update_selection_bias
from l2r_lab.routers.low_rank import LowRankConfig
from l2r_lab.routers.perturbed_cosine import PerturbedCosineConfig
from l2r_lab.routers.sigmoid import SigmoidConfig

ZOO = ("attention", "low_rank", "mixture", "perturbed_cosine", "product_keys", "sigmoid")
SIZES = {"hidden_size": 12, "num_experts": 6, "top_k": 2}


def make(kind, seed=0, **options):
    torch.manual_seed(seed)
    return build_router(kind, **SIZES, dtype="float64", **options).double()


def arrays(router):
    return {k: v.detach().numpy() for k, v in router.state_dict().items()}


def softmax(values):
    e = np.exp(np.array(values) - max(values))
    return e / e.sum()


def perturbed_cosine(x, w, c):
    logits = []
    for token in x:
        q = [sum(a * b for a, b in zip(row, token, strict=True)) for row in w["projection.weight"]]
        row = []
        for k in w["anchors"][:, 0]:
            dot = sum(a * b for a, b in zip(q, k, strict=True))
            q_norm = sum(a * a for a in q) ** 0.5 + c.tau_query
            k_norm = sum(a * a for a in k) ** 0.5 + c.tau_anchor
            row.append(dot / (q_norm * k_norm) / c.temperature)
        logits.append(row)
    return np.array(logits)


def attention(x, w, c):
    del c
    wq, wk, wv = np.split(w["query_key_value.weight"], 3)
    logits = []
    for token in x:
        q, k, v = wq @ token, wk @ token, wv @ token
        logits.append([sum(softmax([q[i] * kj for kj in k]) * v) for i in range(len(q))])
    return np.array(logits)


def mixture(x, w, c):
    logits = []
    for token in x:
        mean = np.zeros(SIZES["num_experts"])
        for m in range(c.routers):
            q = w["projection.weight"][m * c.rank : (m + 1) * c.rank] @ token
            mean += softmax([q @ k / np.sqrt(c.rank) for k in w["keys"][m]]) / c.routers
        logits.append(np.log(mean))
    return np.array(logits)


def low_rank(x, w, c):
    u, v = w["anchors"][:, 0], w["projection.weight"]
    return np.array([u @ (v @ token) / c.temperature for token in x])


def product_keys(x, w, c):
    logits = []
    for token in x:
        size = (sum(v * v for v in token) / len(token) + c.norm_eps) ** 0.5
        query = w["projection.weight"] @ (token / size * w["norm.weight"])
        first, second = query[: c.rank // 2], query[c.rank // 2 :]
        rows, columns = w["row_keys"], w["column_keys"]
        scores = [first @ row + second @ column for row in rows for column in columns]
        logits.append(np.array(scores) / c.temperature)
    return np.array(logits)


def sigmoid(x, w, c):
    del c
    return np.array([[float(row @ token) for row in w["weight"]] for token in x])


REFERENCE = {
    "attention": attention,
    "low_rank": low_rank,
    "mixture": mixture,
    "perturbed_cosine": perturbed_cosine,
    "product_keys": product_keys,
    "sigmoid": sigmoid,
}


@pytest.mark.parametrize("kind", ZOO)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 1000), size=st.sampled_from([0.1, 1.0, 10.0]))
def test_logits_equal_the_formula_of_the_source(kind, seed, size):
    router = make(kind, seed)
    x = torch.randn(4, 12, dtype=torch.float64) * size
    expected = REFERENCE[kind](x.numpy(), arrays(router), router.config)
    np.testing.assert_allclose(router.logits(x).detach().numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in ZOO if kind != "sigmoid"])
def test_softmax_routers_select_from_the_softmax_of_their_logits(kind):
    router = make(kind)
    logits, weights, indices = router(torch.randn(5, 12, dtype=torch.float64))
    for row, w, i in zip(logits, weights, indices, strict=True):
        probs = softmax(row.detach().numpy())
        best = np.argsort(-probs)[:2]
        expected = probs[best] / (probs[best].sum() if router.config.normalize_weights else 1)
        assert i.tolist() == best.tolist()
        np.testing.assert_allclose(w.detach().numpy(), expected, rtol=1e-9)


def test_sigmoid_chooses_with_the_bias_and_weighs_without_it():
    router = make("sigmoid", scale=2.5)
    router.e_score_correction_bias.copy_(torch.tensor([0.0, 0.9, -0.9, 0.3, 0.0, 0.6]))
    logits, weights, indices = router(torch.randn(7, 12, dtype=torch.float64))
    bias = router.e_score_correction_bias.numpy()
    for row, w, i in zip(logits.detach().numpy(), weights, indices, strict=True):
        scores = 1 / (1 + np.exp(-row))
        best = sorted(range(6), key=lambda n: -(scores[n] + bias[n]))[:2]
        assert i.tolist() == best
        expected = [2.5 * scores[n] / sum(scores[b] for b in best) for n in best]
        np.testing.assert_allclose(w.detach().numpy(), expected, rtol=1e-9)


def test_the_bias_moves_by_its_speed_against_the_load():
    bias = torch.tensor([0.5, 0.5, 0.5, 0.5])
    update_selection_bias(bias, torch.tensor([4.0, 0.0, 2.0, 2.0]), speed=0.1)
    torch.testing.assert_close(bias, torch.tensor([0.4, 0.6, 0.5, 0.5]))


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens", "parts"), [(12, 2, 96, 2), (12, 4, 30, 2), (48, 3, 96, 5)]
)
def test_experts_with_the_mean_load_keep_their_bias(experts, top_k, tokens, parts):
    """sign(0) = 0 in arXiv 2408.15664. Shares and their sums are rounded; counts are not."""
    chosen = torch.arange(tokens * top_k).view(tokens, top_k) % experts  # perfectly even
    for load in (expert_usage(chosen, experts) * parts, expert_counts(chosen, experts) * parts):
        bias = torch.zeros(experts)
        update_selection_bias(bias, load)
        assert not bias.any()


def test_counts_are_compared_as_whole_numbers():
    """One token of 2 ** 25: float32 does not tell the numbers apart."""
    for where, sign in ((0, -1), (1, 1)):
        load = torch.full((3,), 2**25)
        load[where] -= sign
        bias = torch.zeros(3, dtype=torch.float64)
        update_selection_bias(bias, load, speed=0.1)
        others = torch.full((3,), 0.1 * -sign, dtype=torch.float64)
        others[where] = 0.1 * sign
        assert torch.equal(bias, others)


@pytest.mark.parametrize("load", [[5, 1, 3, 3], [0.625, 0.125, 0.375, 0.375], [5e9, 1e9, 3e9, 3e9]])
def test_the_unit_of_the_load_does_not_matter(load):
    bias = torch.zeros(4)
    update_selection_bias(bias, torch.tensor(load), speed=1.0)
    assert bias.tolist() == [-1, 1, 0, 0]


@pytest.mark.usefixtures("unchecked")
def test_a_router_without_a_bias_is_refused_and_so_is_another_number_of_experts():
    with pytest.raises(ValueError, match=r"got None: .*l2r\.hf\.swap\.selection_biases"):
        update_selection_bias(None, torch.ones(4))
    with pytest.raises(ValueError, match=r"each of the 3 experts; got \[4\]"):
        update_selection_bias(torch.zeros(3), torch.ones(4))


def test_bias_balancing_evens_out_a_collapsed_router():
    router = make("sigmoid")
    with torch.no_grad():  # all tokens prefer the same two experts
        router.weight.zero_()
        router.weight[:2] += 1.0
    x = torch.rand(256, 12, dtype=torch.float64)
    loads = []
    for _ in range(300):
        loads.append(expert_usage(router(x).indices, 6))
        update_selection_bias(router.e_score_correction_bias, loads[-1], speed=0.01)
    assert loads[0].tolist() == [1, 1, 0, 0, 0, 0]
    later = torch.stack(loads[-100:]).mean(0)  # equal experts take turns
    assert later.max() < 0.4  # 1/3 is perfectly even
    assert later.min() > 0.25


def test_no_gradient_reaches_the_selection_bias():
    router = make("sigmoid")
    router(torch.randn(3, 12, dtype=torch.float64)).weights.sum().backward()
    assert router.weight.grad is not None
    assert not router.e_score_correction_bias.requires_grad
    assert "e_score_correction_bias" in router.state_dict()


def test_perturbation_makes_the_logits_depend_on_the_norm_and_stay_below_a_cosine():
    router = make("perturbed_cosine")
    x = torch.randn(3, 12, dtype=torch.float64)
    small, large = router.logits(x * 1e-3), router.logits(x * 1e3)
    assert small.abs().max() < large.abs().max() < 1 / router.config.temperature


def test_attention_logits_lie_between_the_smallest_and_the_largest_value():
    router = make("attention", init_std=1.0)
    x = torch.randn(9, 12, dtype=torch.float64)
    value = (x @ router.query_key_value.weight.T).chunk(3, dim=-1)[2]
    logits = router.logits(x)
    assert (logits <= value.amax(-1, keepdim=True) + 1e-12).all()
    assert (logits >= value.amin(-1, keepdim=True) - 1e-12).all()


def test_a_mixture_is_a_distribution_and_more_than_one_linear_router():
    router = make("mixture")
    x = torch.randn(5, 12, dtype=torch.float64)
    logits = router.logits(x)
    torch.testing.assert_close(logits.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    difference = router.logits(2 * x) - 2 * logits
    spread = difference - difference.mean(-1, keepdim=True)
    assert spread.abs().max() > 1e-2  # a linear router's logits would double


def test_a_mixture_starts_from_attention_heads():
    router = make("mixture", routers=2, rank=4)
    heads = torch.randn(16, 12, dtype=torch.float64)
    router.start_from_heads(heads)
    assert torch.equal(router.projection.weight, heads[:8])
    with pytest.raises(ValueError, match="query_weight must have at least 8 rows and 12 columns"):
        router.start_from_heads(heads[:, :3])


@pytest.mark.parametrize("kind", ZOO)
def test_gradients_are_right(kind):
    router = make(kind)
    x = torch.randn(3, 12, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(router.logits, x)


@pytest.mark.parametrize("kind", ZOO)
def test_a_zoo_router_is_registered_and_its_configuration_round_trips(kind):
    assert kind in router_names()
    config = make(kind).config
    assert RouterConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("kind", ZOO)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_shapes_and_dtypes(kind, dtype):
    router = build_router(kind, **SIZES)
    logits, weights, indices = router(torch.randn(2, 3, 12, dtype=dtype))
    assert logits.shape == (6, 6)
    assert logits.dtype == torch.float32
    assert weights.shape == indices.shape == (6, 2)
    assert weights.dtype == dtype


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (PerturbedCosineConfig, "tau_query", 0.0),
        (PerturbedCosineConfig, "tau_anchor", -1.0),
        (PerturbedCosineConfig, "rank", 0),
        (SigmoidConfig, "scale", 0.0),
        (LowRankConfig, "rank", 0),
    ],
)
def test_bad_options_are_named(config, field, value):
    with pytest.raises(ValueError, match=f"{field} must be .*; got {field}={value}"):
        config(**{field: value})


@pytest.mark.parametrize("kind", router_names())
def test_parameters_are_counted_whatever_the_router_does_with_its_weights(kind):
    """Some normalize their weights, which takes at least two experts."""
    sizes = {name: SIZES[name] for name in ("hidden_size", "num_experts")}
    options = {"rank": 2} if "l2r" in kind else {}
    expected = sum(p.numel() for p in build_router(kind, **SIZES, **options).parameters())
    assert router_parameters(kind, **sizes, **options) == expected


@pytest.mark.parametrize(("width", "rank"), [(64, 2), (64, 32), (512, 8)])
def test_logits_of_a_low_rank_router_start_with_unit_variance_at_any_size(width, rank):
    """Five standard errors: var of a product of two matrices varies with both their sizes."""
    router = build_router("low_rank", hidden_size=width, num_experts=256, top_k=2, rank=rank)
    variance = float(router.logits(torch.randn(256, width)).detach().var())
    # at 3 sigma a cut normal has 0.973 of its variance, in each of the two matrices
    assert abs(variance / 0.973**2 - 1) < 5 * (2 / rank + 2 / 256 + 2 / width) ** 0.5


def test_a_low_rank_router_is_the_linear_router_of_its_product():
    router = make("low_rank", rank=3, temperature=0.5)
    linear = make("linear")
    with torch.no_grad():
        linear.weight.copy_(router.anchors[:, 0] @ router.projection.weight / 0.5)
    x = torch.randn(7, 12, dtype=torch.float64)
    for ours, theirs in zip(router(x), linear(x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_rank_above_the_width_is_refused():
    with pytest.raises(ValueError, match="rank must be <= hidden_size; got rank=13"):
        build_router("low_rank", **SIZES, rank=13)
