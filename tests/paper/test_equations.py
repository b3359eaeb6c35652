"""Every numbered equation of the paper against the code that implements it.

Numbers count the paper's equation environments in order. References are written out here, so
that a reader can hold each test against the paper's page.
"""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from l2r import build_router
from l2r.functional import (
    cosine_scores,
    dot_scores,
    expert_usage,
    load_balancing_loss,
    low_rank_query,
    mean_probs,
    phi,
    pool_anchors,
    psi,
    router_z_loss,
    routing_probs,
    select_experts,
    sips_scores,
)
from l2r.moe import Experts, MoELayer
from l2r.routers import capture
from l2r.routers.count import router_cost, router_parameters
from l2r_lab.training.objective import auxiliary_losses
from l2r_lab.training.recipes.schema import LossSection

T, D, R, N, H, K = 7, 12, 3, 5, 4, 2


@pytest.fixture
def x():
    return torch.randn(T, D, dtype=torch.float64)


@pytest.fixture
def q():
    return torch.randn(T, R, dtype=torch.float64)


@pytest.fixture
def k():
    return torch.randn(N, H, R, dtype=torch.float64)


def test_eq_1_a_router_gives_one_logit_per_expert(x):
    for kind in ("linear", "l2r_sips"):
        router = build_router(kind, hidden_size=D, num_experts=N, top_k=K)
        assert router(x.float()).logits.shape == (T, N)


def test_eq_2_softmax_with_temperature():
    sizes = {"hidden_size": D, "num_experts": N, "top_k": N}
    router = build_router("linear", **sizes, temperature=2.0)
    x = torch.randn(T, D)
    z = x @ router.weight.T
    expected = (z / 2).exp() / (z / 2).exp().sum(dim=1, keepdim=True)
    output = router(x)
    torch.testing.assert_close(output.weights, expected.gather(1, output.indices))


def test_eq_3_output_is_the_weighted_sum_of_the_chosen_experts(x):
    router = build_router("linear", hidden_size=D, num_experts=N, top_k=K).double()
    experts = Experts(N, D, 6, init_std=0.5).double()
    layer = MoELayer(router, experts)
    _, s, chosen = router(x)
    expected = torch.zeros_like(x)
    for t in range(T):
        for position, i in enumerate(chosen[t].tolist()):
            gate, up = (experts.gate_up_proj[i] @ x[t]).chunk(2)
            expert = experts.down_proj[i] @ (gate * torch.sigmoid(gate) * up)
            expected[t] += s[t, position] * expert
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(x + layer(x), x + expected)  # the residual stays outside


def test_eq_4_and_5_linear_logits_are_inner_products(x):
    router = build_router("linear", hidden_size=D, num_experts=N, top_k=K).double()
    logits = router.logits(x)
    for t in range(T):
        for i in range(N):
            assert logits[t, i].item() == pytest.approx((x[t] @ router.weight[i]).item())


def test_eq_6_query_is_a_shared_projection(x):
    w_q = torch.randn(D, R, dtype=torch.float64)
    torch.testing.assert_close(low_rank_query(x, w_q.T), x @ w_q)
    router = build_router(
        "l2r_dot", hidden_size=D, num_experts=N, top_k=K, rank=R, query_norm="none"
    ).double()
    torch.testing.assert_close(router.query(x), x @ router.projection.weight.T)


def test_eq_7_dot_is_norms_times_cosine(q, k):
    norms = q.norm(dim=1)[:, None, None] * k.norm(dim=2)
    torch.testing.assert_close(dot_scores(q, k), norms * cosine_scores(q, k))


def test_eq_8_and_12_sips_factorizes(q, k):
    factors = phi(q.norm(dim=1), gamma=1.3, beta=0.7)[:, None, None] * psi(k.norm(dim=2), p=3.0)
    expected = factors * dot_scores(q, k) / (q.norm(dim=1)[:, None, None] * k.norm(dim=2))
    torch.testing.assert_close(sips_scores(q, k, gamma=1.3, beta=0.7, p=3.0), expected)


def test_eq_9_phi():
    rho = torch.tensor([-2.0, 0.0, 0.5, 3.0], dtype=torch.float64)
    expected = [1.5 * (1 + 0.4 * math.tanh(value)) for value in rho.tolist()]
    assert phi(rho, gamma=1.5, beta=0.4).tolist() == pytest.approx(expected)


def test_eq_10_interval_of_phi():
    rho = torch.linspace(-50, 50, 999, dtype=torch.float64)
    values = phi(rho, gamma=1.5, beta=0.4)
    assert values.min() >= 1.5 * 0.6 - 1e-12 and values.max() <= 1.5 * 1.4 + 1e-12
    # NOTE: behind RMSNorm the norm is not negative, so only the upper half is reached.
    assert phi(rho.clamp_min(0), gamma=1.5, beta=0.4).min() == 1.5


def test_eq_11_psi():
    assert psi(torch.tensor(3.0), p=4.0).item() == pytest.approx(1 + (3 - 1) / 4)


def test_eq_13_log_sum_exp_pooling(q, k):
    scores = sips_scores(q, k)
    expected = torch.stack([sum(row.exp().unbind(-1)).log() for row in scores])
    torch.testing.assert_close(pool_anchors(scores), expected)


def test_eq_14_and_36_objective(x):
    model = torch.nn.ModuleList(
        [build_router("l2r_sips", hidden_size=D, num_experts=N, top_k=K) for _ in range(2)]
    )
    with capture(model) as captured:
        for router in model:
            router(x.float())
    extra, parts = auxiliary_losses(captured, LossSection(balance=0.01, z=0.001))
    torch.testing.assert_close(extra.detach(), 0.01 * parts["balance"] + 0.001 * parts["z"])


def test_eq_28_to_31_parameters_of_l2r_and_their_share():
    d, n, r, h = 2048, 64, 2, 16
    linear = router_parameters("linear", hidden_size=d, num_experts=n)
    bare = router_parameters(
        "l2r_sips", hidden_size=d, num_experts=n, rank=r, heads=h, query_norm="none"
    )
    assert linear == d * n and bare == d * r + n * h * r
    assert bare / linear == pytest.approx(r / n + h * r / d)


COSTS = {
    "linear": ({}, lambda d, n: d * n),
    "linear_sips": ({}, lambda d, n: d * n),
    "xmoe": ({"rank": 6}, lambda d, n: d * 6 + n * 6),
    "l2r_dot": ({"rank": 2, "heads": 1}, lambda d, n: d * 2 + n * 1 * 2),
    "l2r_cosine": ({"rank": 3, "heads": 4}, lambda d, n: d * 3 + n * 4 * 3),
    "l2r_sips": ({"rank": 2, "heads": 16}, lambda d, n: d * 2 + n * 16 * 2),
}


@pytest.mark.parametrize("kind", COSTS)
def test_eq_29_and_32_cost_is_the_formula_and_what_torch_counts(kind):
    options, formula = COSTS[kind]
    sizes = {"hidden_size": 24, "num_experts": 10}
    cost = router_cost(kind, **sizes, **options)
    assert cost == formula(24, 10)
    with torch.device("meta"):
        router = build_router(kind, top_k=2, **sizes, **options)
        x = torch.empty(7, 24)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        router(x)
    assert counter.get_total_flops() == 2 * 7 * cost  # a multiply-add counts as two


def test_eq_32_over_eq_29_is_the_share_of_the_parameters_without_gain():
    sizes = {"hidden_size": 2048, "num_experts": 64}
    linear, own = (router_cost(k, **sizes) for k in ("linear", "l2r_sips"))
    assert own / linear == pytest.approx(2 / 64 + 16 * 2 / 2048)
    with pytest.raises(ValueError, match=r"must be among linear, .*; got mixture"):
        router_cost("mixture", **sizes)


def test_eq_33_shares_and_usage():
    logits = torch.randn(T, N, dtype=torch.float64)
    probs = routing_probs(logits)
    _, indices = select_experts(probs, K)
    for i in range(N):
        s_bar = sum(probs[t, i].item() for t in range(T)) / T
        f = sum(i in indices[t].tolist() for t in range(T)) / T
        assert mean_probs(logits)[i].item() == pytest.approx(s_bar)
        assert expert_usage(indices, N)[i].item() == pytest.approx(f)


def test_eq_34_load_balance_is_k_when_even():
    logits = torch.randn(T, N, dtype=torch.float64)
    indices = logits.topk(K).indices
    expected = N * (mean_probs(logits) @ expert_usage(indices, N).double())
    torch.testing.assert_close(load_balancing_loss(logits, indices), expected)
    even = torch.tensor([[i, (i + 1) % N] for i in range(N)])
    assert load_balancing_loss(torch.zeros(N, N), even).item() == pytest.approx(K)


def test_eq_35_z_loss_and_its_floor_for_bounded_logits():
    logits = torch.randn(T, N, dtype=torch.float64)
    expected = sum(math.log(row.exp().sum()) ** 2 for row in logits) / T
    assert router_z_loss(logits).item() == pytest.approx(expected)
    router = build_router("l2r_sips", hidden_size=D, num_experts=64, top_k=8, heads=16)
    logits = router.logits(torch.randn(100, D))
    # A score of an anchor of norm 1 is at most gamma (1 + beta) = 2 either way, whatever x is.
    middle = math.log(64 * 16)
    assert (middle - 2) ** 2 < router_z_loss(logits).item() < (middle + 2) ** 2
