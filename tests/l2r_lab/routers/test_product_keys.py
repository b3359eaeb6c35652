"""Product keys: the grid, the exact choice from few candidates, and the way without logits."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from l2r import build_router, capture
from l2r.functional import best_experts
from l2r.kernels import dispatch
from l2r.moe import Experts, MoELayer
from l2r.routers import Router, make_config
from l2r.routers.count import router_cost, router_parameters
from l2r.routers.defaults import vision_router
from l2r.routers.selection_rule import Selection
from l2r_lab.routers import product_keys
from l2r_lab.routers.product_keys import ProductKeysConfig, grid_of
from l2r_lab.routers.product_top_k import product_logsumexp, product_scores, product_top_k

SIZES = {"hidden_size": 24, "num_experts": 128, "top_k": 4}
# Equal numbers, numbers whose sum with a large one rounds, and all that is no number.
ODD = [0.0, -0.0, 1.0, 1 + 2**-23, 1 - 2**-24, 2**24, -(2**24), 3e38, -3e38, 1e-45]
ODD += [float("inf"), float("-inf"), float("nan")]


def make(**options):
    torch.manual_seed(0)
    return build_router("product_keys", **{**SIZES, **options})


def halves(draw_from, rows, columns):
    def table(width):
        row = st.lists(draw_from, min_size=width, max_size=width)
        return st.lists(row, min_size=3, max_size=3).map(torch.tensor)

    return st.tuples(table(rows), table(columns))


@settings(deadline=None, max_examples=80)
@given(data=st.data(), grid=st.sampled_from([(1, 3), (2, 3), (4, 4), (5, 7)]))
def test_candidates_hold_the_best_of_all_experts_and_their_order(data, grid):
    odd, usual = st.sampled_from(ODD), st.floats(-4, 4, width=32)
    first, second = data.draw(halves(st.one_of(odd, usual), *grid))
    top_k = data.draw(st.integers(1, grid[0] * grid[1]))
    expected = best_experts(product_scores(first, second), top_k)
    assert product_top_k(first, second, top_k).tolist() == expected.tolist()


def test_a_tie_that_rounding_makes_goes_to_the_lowest_index():
    """1 and 1 + 2^-23 beside 2^26 are equal, so expert 0 comes first, though row 1 is better."""
    first, second = torch.tensor([[1.0, 1 + 2**-23]]), torch.tensor([[2.0**26, 0.0]])
    assert product_top_k(first, second, 1).tolist() == [[0]]
    assert product_top_k(first, torch.zeros(1, 2), 1).tolist() == [[2]]


@pytest.mark.parametrize("form", ["cpu", "plain"])
def test_random_scores_are_ranked_from_candidates_alone(form, monkeypatch):
    """Not from all scores, which would be as right: no call sees more than K x K of them."""
    torch.manual_seed(0)
    first, second = torch.randn(2, 50, 64)
    expected = best_experts(product_scores(first, second), 8)
    widths, best = [], dispatch.best_experts

    def spy(ranking, top_k):
        widths.append(ranking.shape[1])
        return best(ranking, top_k)

    monkeypatch.setattr(dispatch, "best_experts", spy)
    with dispatch.implementation(form):
        assert torch.equal(product_top_k(first, second, 8), expected)
    assert widths == [64, 64, 64]


def test_the_sum_over_all_experts_factorizes():
    torch.manual_seed(0)
    first, second = torch.randn(5, 6).double() * 9, torch.randn(5, 7).double() * 9
    whole = product_scores(first, second).logsumexp(1, keepdim=True)
    torch.testing.assert_close(product_logsumexp(first, second), whole, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"normalize_weights": True},
        {"temperature": 0.3},
        {"learn_temperature": True, "temperature": 3.0},
        {"query_norm": "none"},
        {"query_norm": "batchnorm"},
        {"dtype": "float64"},
    ],
    ids=str,
)
def test_without_logits_the_choice_is_the_same_and_weights_and_gradients_are_equal(options):
    """Weights to 16 roundings of a sum of exponentials: both ways are compared with exact ones."""
    router = make(**options)
    x = torch.randn(2, 30, 24, requires_grad=True)
    shares = torch.randn(60, 4)

    def run(call):
        *_, weights, indices = call(x)
        leaves = [x, *router.parameters()]
        return weights, indices, torch.autograd.grad((weights * shares).sum(), leaves)

    weights, indices, gradients = run(router.choose)
    wanted, chosen, exact = run(router)
    assert torch.equal(indices, chosen)
    torch.testing.assert_close(weights, wanted, rtol=16 * 2**-23, atol=0)
    for ours, theirs in zip(gradients, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_weights_of_half_precision_scores_are_summed_in_full():
    """As softmax does; what differs is that its sum is of scores rounded by 2^-8."""
    router = make(dtype="bfloat16", num_experts=4096).bfloat16()
    x = torch.randn(40, 24).bfloat16()
    weights, indices = router._choose(x)
    logits, wanted, chosen = router(x)
    assert logits.dtype == torch.bfloat16
    assert torch.equal(indices, chosen) and weights.dtype == torch.float32
    largest = logits.abs().max().item()
    exact = torch.softmax(logits.float(), dim=1).gather(1, indices)
    torch.testing.assert_close(weights, exact, rtol=largest * 2**-8, atol=0)
    assert router.choose(x)[0].dtype == wanted.dtype == torch.bfloat16


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 99), size=st.sampled_from([0.0, 1e-30, 1.0, 1e4]), k=st.integers(1, 11))
def test_without_logits_the_choice_is_that_of_the_logits_at_any_size(seed, size, k):
    router = make(top_k=k, query_norm="none")
    torch.manual_seed(seed)
    x = torch.randn(9, 24) * size
    weights, indices = router.choose(x)
    assert torch.equal(indices, best_experts(router.logits(x), k))
    assert weights.dtype == x.dtype


@pytest.fixture
def rows_made(monkeypatch):
    """The number of times that the logits of all experts are made."""
    made, scores = [], product_keys.product_scores
    monkeypatch.setattr(
        product_keys, "product_scores", lambda *halves: made.append(1) or scores(*halves)
    )
    return made


def test_a_layer_makes_no_logits_unless_they_are_seen(rows_made):
    router = make()
    layer, x = MoELayer(router, Experts(128, 24, 8)), torch.randn(5, 24)
    y = layer(x)
    assert not rows_made
    with capture(layer) as record:
        torch.testing.assert_close(layer(x), y)
    assert len(rows_made) == 1
    assert record.logits()[0].shape == (5, 128)
    for register in (
        router.register_forward_hook,
        router.register_forward_pre_hook,
        router.register_full_backward_hook,
    ):
        rows_made.clear()
        handle = register(lambda *_: None)
        layer(x)
        handle.remove()
        assert rows_made == [1], register
    rows_made.clear()
    router.selection = Selection(scale=2.0)
    layer(x)
    assert rows_made == [1]


def test_a_layer_with_a_replaced_forward_runs_it(rows_made):
    router = make()
    original = router.forward
    router.forward = lambda x: original(2 * x)
    weights, indices = router.choose(torch.ones(3, 24))
    del router.forward
    assert torch.equal(indices, router(torch.full((3, 24), 2.0)).indices)
    assert len(rows_made) == 2 and weights.shape == (3, 4)


def test_where_candidates_would_be_many_all_logits_are_made(rows_made):
    make(num_experts=64).choose(torch.randn(3, 24))
    assert rows_made == [1]
    make(num_experts=66).choose(torch.randn(3, 24))
    assert rows_made == [1]


@pytest.mark.parametrize("temperature", [1.0, 1e-2, 1e-3, 1e-5])
def test_weights_of_a_choice_are_those_of_the_forward_whatever_the_size_of_logits(temperature):
    """Four roundings of a weight, and no weight above 1, where near ties make weights differ."""
    router = make(num_experts=256, temperature=temperature)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        noise = 1e-4 * temperature * torch.randn(2, 1, generator=draw)
        router.row_keys.mul_(4)
        router.row_keys[1:3] = router.row_keys[0] * (1 + noise)
    x = torch.randn(512, router.hidden_size, generator=draw, requires_grad=True)
    _, wanted, indices = router(x)
    weights, chosen = router.choose(x)
    assert torch.equal(indices, chosen) and weights.max() <= 1 + 2**-23
    torch.testing.assert_close(weights, wanted, atol=1e-7, rtol=4e-6)
    if temperature == 1:  # else a gradient is what rounding leaves of saturated weights
        ours, theirs = (torch.autograd.grad(w.square().sum(), x)[0] for w in (weights, wanted))
        torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=0)


def test_every_router_chooses_as_it_routes():
    for kind in ("linear", "l2r_sips", "sigmoid"):
        router: Router = build_router(kind, **SIZES)
        x = torch.randn(4, 24)
        for ours, theirs in zip(router.choose(x), router(x)[1:], strict=True):
            assert torch.equal(ours, theirs)


def test_a_batch_norm_of_the_query_is_that_of_torch():
    router = make(query_norm="batchnorm").double()
    norm = torch.nn.BatchNorm1d(16, eps=router.config.norm_eps).double()
    with torch.no_grad():
        for ours, theirs in zip(router.batch_norm.parameters(), norm.parameters(), strict=True):
            theirs.copy_(ours.normal_())
    for training in (True, True, False):
        router.train(training), norm.train(training)
        x = torch.randn(40, 24, dtype=torch.float64)
        query = norm(x @ router.projection.weight.T)
        first, second = query.chunk(2, dim=1)
        expected = (first @ router.row_keys.T).unsqueeze(2)
        expected = expected + (second @ router.column_keys.T).unsqueeze(1)
        torch.testing.assert_close(router(x).logits, expected.flatten(1))
    state = norm.state_dict()
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(router.batch_norm, name), state[name])


def test_gradients_through_a_batch_norm_are_right():
    router = build_router(
        "product_keys", hidden_size=5, num_experts=6, top_k=2, rank=4, query_norm="batchnorm"
    ).double()
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(router.logits, (x,))


@pytest.mark.parametrize(
    ("num_experts", "grid"),
    [(1, (1, 1)), (3, (1, 3)), (6, (2, 3)), (60, (6, 10)), (128, (8, 16)), (4096, (64, 64))],
)
def test_a_grid_is_as_nearly_square_as_its_number_allows(num_experts, grid):
    assert grid_of(num_experts) == grid


@pytest.mark.parametrize("num_experts", [5, 7, 257])
def test_a_prime_number_of_experts_is_refused_with_the_nearest_that_are_not(num_experts):
    nearest = f"got num_experts={num_experts}; the nearest are {num_experts - 1} and"
    with pytest.raises(ValueError, match=nearest):
        make(num_experts=num_experts)
    for near in (num_experts - 1, num_experts + 1):
        make(num_experts=near)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 7}, "rank must be even and >= 2; got rank=7"),
        ({"rank": 0}, "rank must be even and >= 2; got rank=0"),
        ({"rank": 50}, "rank must be <= 2 hidden_size, .*; got rank=50, hidden_size=24"),
        ({"norm_eps": 0.0}, "norm_eps must be > 0"),
        ({"query_norm": "none", "norm_eps": 1e-3}, "norm_eps is read only with query_norm"),
    ],
)
def test_settings_that_do_not_fit_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_vision_models_normalize_the_query_over_the_batch():
    config = vision_router({"kind": "product_keys"})
    assert config == ProductKeysConfig(query_norm="batchnorm")
    assert vision_router({"kind": "product_keys", "query_norm": "none"}).query_norm == "none"


@pytest.mark.parametrize(("width", "rank"), [(64, 4), (64, 64), (512, 16)])
def test_logits_start_with_unit_variance_at_any_size(width, rank):
    """Five standard errors; at 3 sigma a cut normal has 0.973 of its variance, in each matrix."""
    torch.manual_seed(0)
    router = make(hidden_size=width, num_experts=4096, rank=rank, query_norm="none")
    variance = float(router.logits(torch.randn(256, width)).detach().var())
    bound = 5 * (2 / rank + 2 / 64 + 2 / width) ** 0.5  # each half counts rank / 2 twice
    assert abs(variance / 0.973**2 - 1) < bound


def test_parameters_and_cost_grow_with_the_root_of_the_experts():
    sizes = {"hidden_size": 512, "num_experts": 4096}
    options = {"rank": 32, "query_norm": "none"}
    expected = 512 * 32 + 2 * 64 * 16
    assert router_parameters("product_keys", **sizes, **options) == expected
    assert router_cost("product_keys", **sizes, **options) == expected
    low_rank = 512 * 32 + 4096 * 32
    assert router_cost("low_rank", **sizes, rank=32) == low_rank
    assert make_config("product_keys").query_norm == "rmsnorm"


def test_logits_are_an_additive_table():
    """z_ij - z_il - z_mj + z_ml = 0 for any two rows and columns, and of no smaller structure."""
    router = make(query_norm="none").double()
    table = router.logits(torch.randn(3, 24, dtype=torch.float64)).detach().view(3, 8, 16).numpy()
    parts = table - table.mean(1, keepdims=True) - table.mean(2, keepdims=True)
    np.testing.assert_allclose(parts + table.mean((1, 2), keepdims=True), 0, atol=1e-12)
    assert table.std(1).min() > 0 and table.std(2).min() > 0
