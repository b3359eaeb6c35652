"""The MoE layer against a dense reference: every expert on every token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from l2r import build_router
from l2r.moe import Experts, MoELayer
from l2r.moe.grouped import grouped_linear
from l2r.moe.token_dispatch import ByRow, assign, by_expert

KINDS = [("swiglu", False), ("gelu", False), ("gelu", True)]


def dense(experts, x, indices, weights):
    """All experts on all tokens, then the chosen ones weighted; no dispatch at all."""
    out = torch.zeros_like(x)
    for n in range(experts.num_experts):
        if experts.activation == "swiglu":
            gate, up = (x @ experts.gate_up_proj[n].T).chunk(2, dim=-1)
            hidden = torch.sigmoid(gate) * gate * up
        else:
            hidden = x @ experts.up_proj[n].T
            hidden = hidden if experts.up_bias is None else hidden + experts.up_bias[n]
            hidden = 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
        result = hidden @ experts.down_proj[n].T
        result = result if experts.down_bias is None else result + experts.down_bias[n]
        share = ((indices == n) * weights).sum(dim=1, keepdim=True)
        out = out + share * result
    return out


def build(activation, bias, dtype):
    experts = Experts(6, 16, 8, activation=activation, bias=bias, init_std=0.5).to(dtype)
    if bias:
        torch.nn.init.normal_(experts.up_bias)
        torch.nn.init.normal_(experts.down_bias)
    return experts


def routing(tokens, skew, dtype):
    logits = torch.randn(tokens, 6)
    logits[: tokens // 2, 2] += 10 * skew  # with skew, expert 2 takes half of the tokens
    weights, indices = logits.softmax(-1).topk(2)
    return indices, weights.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize(("activation", "bias"), KINDS)
def test_layer_equals_dense_reference_forward_and_backward(activation, bias, skew, dtype):
    experts = build(activation, bias, dtype)
    x = torch.randn(23, 16, dtype=dtype, requires_grad=True)
    indices, weights = routing(23, skew, dtype)
    weights.requires_grad_()
    inputs = [x, weights, *experts.parameters()]
    direction = torch.randn(23, 16, dtype=dtype)
    ours = experts(x, indices, weights)
    expected = dense(experts, x, indices, weights)
    torch.testing.assert_close(ours, expected)  # torch's bounds for the dtype: sums of 16 terms
    grads = torch.autograd.grad(ours, inputs, direction)
    wanted = torch.autograd.grad(expected, inputs, direction)
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("trained", ["router", "experts", "tokens"])
def test_what_trains_alone_has_its_gradient_of_the_dense_reference(trained):
    """As in a fit, with frozen experts, and in a training with a frozen router."""
    experts = build("swiglu", False, torch.float64)
    experts.requires_grad_(trained == "experts")
    x = torch.randn(23, 16, dtype=torch.float64, requires_grad=trained == "tokens")
    indices, weights = routing(23, 1, torch.float64)
    weights.requires_grad_(trained == "router")
    inputs = {"router": [weights], "experts": [*experts.parameters()], "tokens": [x]}[trained]
    direction = torch.randn(23, 16, dtype=torch.float64)
    found = [
        torch.autograd.grad(layer(x, indices, weights), inputs, direction)
        for layer in (experts, lambda *given: dense(experts, *given))
    ]
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap of the grouped product
@pytest.mark.filterwarnings("ignore:.*searchsorted")  # vmap of it
@pytest.mark.parametrize("kind", ["linear", "l2r_sips"])
@pytest.mark.parametrize(("activation", "bias"), KINDS)
def test_transforms_of_torch_func_give_what_autograd_gives(kind, activation, bias):
    experts = build(activation, bias, torch.float32)
    layer = MoELayer(build_router(kind, hidden_size=16, num_experts=6, top_k=2), experts)
    weights = {name: value.detach() for name, value in layer.named_parameters()}
    x, direction = torch.randn(2, 3, 5, 16)

    def run(weights, x):
        return torch.func.functional_call(layer, weights, (x,))

    whole = layer(x)
    wanted = torch.autograd.grad((whole * direction).sum(), list(layer.parameters()))
    found = torch.func.grad(lambda weights: (run(weights, x) * direction).sum())(weights)
    for one, other in zip(found.values(), wanted, strict=True):
        torch.testing.assert_close(one, other)
    rows = torch.vmap(run, (None, 0))(weights, x)
    torch.testing.assert_close(rows, torch.stack([layer(row) for row in x]).detach())
    with torch.no_grad():  # one token at a time, which decoding takes row by row
        one = torch.vmap(run, (None, 0))(weights, x[0].unsqueeze(1))
    torch.testing.assert_close(one.squeeze(1), layer(x[0]).detach())
    _, along = torch.func.jvp(lambda x: run(weights, x), (x,), (direction,))
    up = torch.randn_like(whole)
    _, back = torch.func.vjp(lambda x: run(weights, x), x)
    torch.testing.assert_close((along * up).sum(), (back(up)[0] * direction).sum())


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_and_one_token(tokens):
    experts = build("swiglu", False, torch.float32)
    indices, weights = routing(tokens, 0, torch.float32)
    x = torch.randn(tokens, 16)
    torch.testing.assert_close(experts(x, indices, weights), dense(experts, x, indices, weights))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("activation", "bias"), KINDS)
def test_few_rows_without_gradients_equal_the_dense_reference(activation, bias, tokens):
    experts = build(activation, bias, torch.float32)
    indices, weights = routing(tokens, 0, torch.float32)
    x = torch.randn(tokens, 16)
    with torch.no_grad():
        assert isinstance(assign(x, indices, 6), ByRow)
        torch.testing.assert_close(
            experts(x, indices, weights), dense(experts, x, indices, weights)
        )
    assert not isinstance(assign(x, indices, 6), ByRow)


@given(tokens=st.integers(1, 40), top_k=st.integers(1, 5), seed=st.integers(0, 99))
def test_assignment_is_a_sorted_permutation(tokens, top_k, seed):
    torch.manual_seed(seed)
    indices = torch.rand(tokens, 7).topk(top_k).indices
    plan = by_expert(indices, 7)
    assert sorted(plan.order.tolist()) == list(range(tokens * top_k))
    assert (plan.expert.diff() >= 0).all() and plan.ends[-1] == tokens * top_k
    assert torch.equal(indices.flatten()[plan.order], plan.expert)
    assert torch.equal(plan.token, plan.order // top_k)


def test_combine_undoes_the_order():
    indices = torch.tensor([[2, 0], [1, 2], [0, 1]])
    plan = by_expert(indices, 3)
    rows = torch.arange(6.0)[:, None][plan.order]
    weights = torch.tensor([[1.0, 10.0], [1.0, 10.0], [1.0, 10.0]])
    assert plan.combine(rows, weights).flatten().tolist() == [10.0, 32.0, 54.0]


def test_grouped_linear_skips_empty_groups():
    x, weight = torch.randn(4, 16), torch.randn(3, 8, 16)
    ends = torch.tensor([0, 4, 4], dtype=torch.int32)
    torch.testing.assert_close(grouped_linear(x, weight, ends), x @ weight[1].T)


def test_layer_trains_router_and_experts():
    router = build_router("l2r_sips", hidden_size=16, num_experts=6, top_k=2)
    layer = MoELayer(router, build("swiglu", False, torch.float32))
    layer(torch.randn(2, 5, 16)).square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Experts(4, 8, 8, activation="relu"), "activation must be swiglu or gelu"),
        (lambda: Experts(4, 8, 8, bias=True), "bias is for gelu experts"),
        (
            lambda: MoELayer(
                build_router("linear", hidden_size=8, num_experts=3, top_k=1), Experts(4, 8, 8)
            ),
            "must agree on num_experts",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
