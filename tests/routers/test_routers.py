"""Every router against an independent float64 reference, forward and gradient; the contract."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter

import l2r
from l2r import L2RConfig, RouterConfig, XMoEConfig, build_router, capture, register_router
from l2r.files.shared_settings import PAPER_ROUTERS
from l2r.routers import LinearRouter, Router, make_config, router_names
from l2r.routers.holder import BareLinear
from l2r.routers.norms import QueryBatchNorm
from tests import reference
from tests.quick import unchecked

SIZES = [(16, 4, 2), (24, 9, 3), (8, 2, 1)]  # hidden size, experts, top-k


def reference_logits(router, x):
    """Logits of a router of ours in numpy, from its parameters by name."""
    state = {name: value.detach().double().numpy() for name, value in router.state_dict().items()}
    config = router.config
    if "weight" in state:
        return x @ state["weight"].T
    hidden = x
    if "norm.weight" in state:
        hidden = reference.rms_normalized(x, state["norm.weight"], config.norm_eps)
    query = hidden @ state["projection.weight"].T if "projection.weight" in state else hidden
    options = {"eps": config.eps}
    kind = getattr(config, "scoring", "cosine")
    if kind == "sips":
        options |= {"gamma": config.gamma, "beta": config.beta, "p": config.p}
    return reference.expert_logits(kind, query, state["anchors"], **options)


def spread(router, seed):
    """Move the parameters away from their initial values, so that gains and norms matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in router.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * noise)
    return router


@pytest.mark.parametrize("kind", PAPER_ROUTERS)
@pytest.mark.parametrize("sizes", SIZES)
def test_router_equals_the_reference(kind, sizes):
    hidden, experts, top_k = sizes
    options = {"rank": 3, "heads": 4} if kind.startswith("l2r") else {}
    router = build_router(
        kind, hidden_size=hidden, num_experts=experts, top_k=top_k, **options
    ).double()
    spread(router, seed=hidden)
    x = np.random.default_rng(experts).normal(size=(11, hidden)) * 3
    output = router(torch.tensor(x))
    expected = reference_logits(router, x)
    np.testing.assert_allclose(output.logits.detach(), expected, atol=1e-10)
    probs = reference.softmax(expected)
    order = np.argsort(-probs, axis=1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(output.indices, order)
    np.testing.assert_allclose(
        output.weights.detach(), np.take_along_axis(probs, order, 1), atol=1e-10
    )


@pytest.mark.parametrize(
    ("kind", "constants"),
    [
        ("l2r_sips", {"gamma": 1.3, "beta": 0.4, "p": 2.5, "eps": 0.7, "norm_eps": 0.5}),
        ("l2r_cosine", {"eps": 0.7, "norm_eps": 0.5}),
        ("l2r_dot", {"norm_eps": 0.5}),
        ("linear_sips", {"gamma": 1.3, "beta": 0.4, "p": 2.5, "eps": 0.7, "norm_eps": 0.5}),
        ("xmoe", {"eps": 0.7}),
    ],
)
def test_every_constant_reaches_the_logits(kind, constants):
    """Constants far from their defaults, each of which alone changes what comes out."""
    sizes = {"hidden_size": 12, "num_experts": 5, "top_k": 2}
    x = torch.randn(7, 12, dtype=torch.float64) * 0.1  # small: so that eps is above some norms
    router = spread(build_router(kind, **sizes, **constants).double(), seed=3)
    state = router.state_dict()
    logits = router(x).logits.detach()
    np.testing.assert_allclose(logits, reference_logits(router, x.numpy()), atol=1e-10)
    for name in constants:
        others = {n: value for n, value in constants.items() if n != name}
        usual = build_router(kind, **sizes, **others).double()
        usual.load_state_dict(state)
        assert (usual(x).logits - logits).abs().max() > 1e-6, name


@pytest.mark.parametrize("kind", PAPER_ROUTERS)
def test_gradients_equal_finite_differences_of_the_reference(kind):
    options = {"rank": 2, "heads": 3} if kind.startswith("l2r") else {}
    router = build_router(kind, hidden_size=6, num_experts=4, top_k=2, **options).double()
    spread(router, seed=4)
    x = np.random.default_rng(1).normal(size=(5, 6))
    direction = np.random.default_rng(2).normal(size=(5, 4))
    (router.logits(torch.tensor(x)) * torch.tensor(direction)).sum().backward()
    step = 1e-6
    for name, parameter in router.named_parameters():
        flat = parameter.data.view(-1)
        for position in range(0, flat.numel(), max(1, flat.numel() // 7)):
            values = []
            for sign in (1, -1):
                flat[position] += sign * step
                values.append((reference_logits(router, x) * direction).sum())
                flat[position] -= sign * step
            expected = (values[0] - values[1]) / (2 * step)
            found = parameter.grad.view(-1)[position].item()
            assert found == pytest.approx(expected, abs=1e-6, rel=1e-6), (name, position)


@pytest.mark.parametrize("kind", PAPER_ROUTERS)
def test_gradcheck(kind):
    router = build_router(kind, hidden_size=5, num_experts=4, top_k=2).double()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(router.logits, (x,))


def test_linear_equals_the_hugging_face_router():
    config = OlmoeConfig(hidden_size=32, num_experts=8, num_experts_per_tok=3)
    theirs = OlmoeTopKRouter(config)
    torch.nn.init.normal_(theirs.weight)
    ours = build_router("linear", hidden_size=32, num_experts=8, top_k=3)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 7, 32)
    for mine, other in zip(ours(x), theirs(x), strict=True):
        torch.testing.assert_close(mine, other)


def test_one_head_equals_a_single_anchor_without_pooling():
    router = build_router("l2r_sips", hidden_size=16, num_experts=5, top_k=2, heads=1)
    x = torch.randn(9, 16)
    from l2r.functional import sips_scores

    expected = sips_scores(router.query(x), router.anchors)[..., 0]
    torch.testing.assert_close(router.logits(x), expected)


def test_beta_zero_is_gamma_psi_cosine():
    sizes = {"hidden_size": 16, "num_experts": 5, "top_k": 2, "heads": 1}
    sips = build_router("l2r_sips", **sizes, beta=0.0, gamma=1.5)
    cosine = build_router("l2r_cosine", **sizes)
    cosine.load_state_dict(sips.state_dict())
    x = torch.randn(9, 16)
    torch.testing.assert_close(sips.logits(x), 1.5 * cosine.logits(x))  # psi is 1 at the start


def test_anchors_start_on_the_unit_sphere():
    router = build_router("l2r_sips", hidden_size=64, num_experts=8, top_k=2, rank=4, heads=16)
    torch.testing.assert_close(router.anchors.norm(dim=-1), torch.ones(8, 16))


def test_norm_eps_reaches_the_norm_of_the_magnitude():
    sizes = {"hidden_size": 16, "num_experts": 4, "top_k": 2}
    router = build_router("l2r_sips", **sizes, query_norm="batchnorm", norm_eps=0.5).eval()
    norm, x = router.magnitude_norm, torch.randn(7, 16)
    torch.nn.init.constant_(norm.running_var, 0.5)
    rho = router.query(x).norm(dim=-1)
    torch.testing.assert_close(norm(rho), rho)  # (rho - 0) / sqrt(0.5 + 0.5)


def test_batchnorm_of_the_magnitude_uses_batch_then_running_statistics():
    router = build_router(
        "l2r_sips", hidden_size=16, num_experts=4, top_k=2, query_norm="batchnorm"
    ).double()
    x = torch.randn(50, 16, dtype=torch.float64)
    rho = router.query(x).norm(dim=-1)
    hat = (rho - rho.mean()) / (rho.var(unbiased=False) + 1e-5).sqrt()
    anchors = router.anchors.detach().numpy()
    expected = reference.expert_logits(
        "sips", router.query(x).detach().numpy(), anchors, rho_hat=hat.detach().numpy()
    )
    np.testing.assert_allclose(router.logits(x).detach(), expected, atol=1e-9)
    norm = router.magnitude_norm
    assert norm.running_mean.item() == pytest.approx(0.1 * rho.mean().item())
    assert norm.running_var.item() == pytest.approx(0.9 + 0.1 * rho.var().item())
    router.eval()
    before = norm.running_mean.clone()
    single = torch.cat([router.logits(row[None]) for row in x])
    torch.testing.assert_close(single, router.logits(x))
    assert torch.equal(before, norm.running_mean)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", router_names())
def test_half_precision_inputs_are_routed_in_fp32_and_autocast_is_off(kind, training):
    router = build_router(kind, hidden_size=16, num_experts=4, top_k=2).train(training)
    x = torch.randn(6, 16).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = router(x)
    assert output.logits.dtype == torch.float32 and output.weights.dtype == torch.bfloat16
    torch.testing.assert_close(output.logits, router(x.float()).logits)


@pytest.mark.parametrize("kind", router_names())
def test_a_query_is_the_same_under_autocast(kind):
    router = build_router(kind, hidden_size=16, num_experts=4, top_k=2)
    x = torch.randn(5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        query = router.query(x)
    torch.testing.assert_close(query, router.query(x))  # of the same dtype, too


@pytest.mark.parametrize("kind", router_names())
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_inputs_that_are_not_floating_point_are_refused(kind, dtype):
    """An output's weights have the input's dtype, so integers would make all of them 0."""
    router = build_router(kind, hidden_size=16, num_experts=4, top_k=2)
    unchecked = type(router).forward.__wrapped__  # without the shape checks of tests
    with pytest.raises(ValueError, match=f"floating-point dtype; got {dtype}"):
        unchecked(router, torch.ones(3, 16, dtype=dtype))


@pytest.mark.parametrize("kind", PAPER_ROUTERS)
@pytest.mark.parametrize("tokens", [0, 1])
def test_empty_and_single_token_batches(kind, tokens):
    router = build_router(kind, hidden_size=16, num_experts=4, top_k=2)
    output = router(torch.randn(tokens, 16))
    assert output.logits.shape == (tokens, 4) and output.indices.shape == (tokens, 2)


@pytest.mark.parametrize("kind", PAPER_ROUTERS)
@pytest.mark.parametrize("value", [0.0, 1e-40, 1e18, -1e18])
def test_extreme_inputs_give_finite_routing(kind, value):
    router = build_router(kind, hidden_size=16, num_experts=4, top_k=2)
    x = torch.full((3, 16), value, requires_grad=True)
    output = router(x)
    assert torch.isfinite(output.weights).all() and torch.isfinite(output.logits).all()
    output.logits.sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("kind", PAPER_ROUTERS)
def test_temperature_divides_logits_and_can_be_learned(kind):
    sizes = {"hidden_size": 16, "num_experts": 4, "top_k": 2}
    plain = build_router(kind, **sizes)
    x = torch.randn(5, 16)
    for options in ({"temperature": 0.5}, {"temperature": 0.5, "learn_temperature": True}):
        router = build_router(kind, **sizes, **options)
        router.load_state_dict(plain.state_dict(), strict=False)
        torch.testing.assert_close(router.logits(x), plain.logits(x) / 0.5)
    router.logits(x).square().sum().backward()
    assert router.log_temperature.grad.abs() > 0


@pytest.mark.parametrize(
    ("kind", "given", "std"),
    [
        ("linear", None, 400**-0.5),
        ("linear", 0.02, 0.02),
        ("xmoe", None, (3 * 400) ** -0.5),
        ("xmoe", 0.02, 0.02),
        ("l2r_sips", None, 400**-0.5),
    ],
)
def test_the_size_of_the_initial_weights(kind, given, std):
    """Cut at 3 sigma, a normal keeps 98.7% of its deviation; 5 standard errors around that."""
    torch.manual_seed(0)
    router = build_router(kind, hidden_size=400, num_experts=64, top_k=2, init_std=given)
    weight = router.weight if kind == "linear" else router.projection.weight
    assert weight.std().item() == pytest.approx(std, rel=0.014 + 5 / (2 * weight.numel()) ** 0.5)


@pytest.mark.parametrize("kind", ["linear", "xmoe", "l2r_sips"])
def test_initial_weights_of_size_zero_are_refused(kind):
    """Drawing them would divide by zero."""
    with pytest.raises(ValueError, match="init_std must be None or > 0; got init_std=0"):
        build_router(kind, hidden_size=8, num_experts=4, top_k=2, init_std=0.0)


def test_normalized_weights_sum_to_one():
    router = build_router("linear", hidden_size=8, num_experts=6, top_k=3, normalize_weights=True)
    sums = router(torch.randn(5, 8)).weights.sum(dim=1)
    torch.testing.assert_close(sums, torch.ones(5))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", router_names())
def test_given_experts_are_weighed_by_the_routers_own_rule(kind, normalize):
    options = {"hidden_size": 16, "num_experts": 8, "top_k": 2}
    given = {} if kind == "sigmoid" else {"normalize_weights": normalize}
    router = build_router(make_config(kind, **given), **options)
    if not router.selection.fused:
        with pytest.raises(ValueError, match="routes need a softmax top-k selection"):
            router(torch.randn(5, 16), routes=torch.zeros(5, 2, dtype=torch.int64))
        return
    routes = torch.rand(5, 8).argsort(dim=1)[:, :2]
    logits, weights, indices = router(torch.randn(5, 16), routes=routes)
    assert torch.equal(indices, routes)
    chosen = logits.softmax(dim=1).gather(1, routes)
    wanted = chosen / chosen.sum(dim=1, keepdim=True) if normalize else chosen
    torch.testing.assert_close(weights, wanted)


@pytest.mark.parametrize("kind", PAPER_ROUTERS)
def test_config_and_weights_make_the_round_trip(kind):
    router = build_router(kind, hidden_size=16, num_experts=4, top_k=2)
    config = RouterConfig.from_dict(router.config.to_dict())
    assert config == router.config and config.kind == kind
    again = build_router(config, hidden_size=16, num_experts=4, top_k=2)
    again.load_state_dict(router.state_dict())
    x = torch.randn(3, 16)
    assert torch.equal(again.logits(x), router.logits(x))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_config("l2r_sip"), "unknown router 'l2r_sip' .did you mean 'l2r_sips'"),
        (lambda: make_config("l2r_sips", rnk=2), "no option 'rnk' .did you mean 'rank'"),
        (lambda: make_config("l2r_sips", rank=0), "rank must be >= 1; got rank=0"),
        (lambda: make_config("l2r_sips", scoring="dot"), "fixes scoring='sips'"),
        (lambda: make_config("l2r_sips", beta=1.5), "beta must be between 0 and 1"),
        (lambda: make_config("l2r_sips", p=0.5), "p must be >= 1"),
        (lambda: make_config("linear", temperature=float("nan")), "temperature must be finite"),
        (lambda: XMoEConfig.preset("mesh"), "preset must be one of torchscale"),
        (lambda: RouterConfig.from_dict({"rank": 2}), "kind is missing"),
        (lambda: build_router("linear", hidden_size=8, num_experts=4, top_k=5), "top_k must be"),
        (lambda: build_router("linear", hidden_size=8, num_experts=4, top_k=0), "top_k must be"),
        (
            lambda: build_router("l2r_sips", hidden_size=8, num_experts=4, top_k=2, rank=9),
            "rank must be <= hidden_size; got rank=9, hidden_size=8; lower rank",
        ),
        (
            lambda: build_router(
                "linear", hidden_size=8, num_experts=4, top_k=1, normalize_weights=True
            ),
            "stops the router's gradient",
        ),
        (
            lambda: build_router("linear", hidden_size=8, num_experts=4, top_k=2)(
                torch.randn(3, 7)
            ),
            "hidden_size=8 as its last dimension",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = build_router("linear", hidden_size=8, num_experts=4, top_k=2)
        self.second = build_router("l2r_sips", hidden_size=8, num_experts=4, top_k=2)

    def forward(self, x):
        return self.first(x).logits.sum() + self.second(x).logits.sum()


def test_capture_collects_outputs_in_order_with_their_graph_and_lets_go():
    model = Block()
    x = torch.randn(3, 8)
    with capture(model, inputs=True) as captured:
        model(x)
        model(x)
    assert list(captured.outputs) == ["first", "second"]
    assert len(captured.logits()) == 4 and torch.equal(captured.inputs["first"][0], x)
    captured.logits()[0].sum().backward()
    assert model.first.weight.grad is not None
    model(x)
    assert len(captured.logits()) == 4


def test_calls_are_recorded_in_their_order():
    model, xs = Block(), [torch.randn(3, 8) for _ in range(3)]
    with capture(model, inputs=True) as captured:
        for x in xs:
            model(x)
    for name, router in (("first", model.first), ("second", model.second)):
        assert all(torch.equal(a, b) for a, b in zip(captured.inputs[name], xs, strict=True))
        for output, x in zip(captured.outputs[name], xs, strict=True):
            assert torch.equal(output.logits, router(x).logits)
    expected = [output.logits for calls in captured.outputs.values() for output in calls]
    assert all(a is b for a, b in zip(captured.logits(), expected, strict=True))
    assert len(captured.indices()) == 6
    assert captured.heads() == 3 * [1] + 3 * [model.second.config.heads]


def test_threads_record_their_own_calls():
    model, both = Block(), threading.Barrier(2, timeout=10)

    def record(tokens):
        with capture(model) as captured:
            both.wait()
            model(torch.randn(tokens, 8))
            both.wait()
        return [len(logits) for logits in captured.logits()]

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(record, (4, 7))) == [[4, 4], [7, 7]]


def test_capture_refuses_a_model_without_routers():
    with (
        pytest.raises(ValueError, match="no router of a supported family"),
        capture(torch.nn.Linear(2, 2)),
    ):
        pass


def test_a_new_router_is_one_class_and_one_decorator():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class UniformConfig(RouterConfig):
        level: float = 0.0

    @register_router("test_uniform")
    class UniformRouter(Router):
        Config = UniformConfig

        def raw_logits(self, x):
            return x.new_full((len(x), self.num_experts), self.config.level)

    router = build_router("test_uniform", hidden_size=4, num_experts=4, top_k=2, level=1.0)
    assert router(torch.randn(3, 4)).logits.unique().item() == 1.0
    assert "test_uniform" in router_names() and router.config.kind == "test_uniform"
    with pytest.raises(ValueError, match="is taken by"):
        register_router("test_uniform")(LinearRouter)


def test_l2r_config_selects_its_name_by_scoring():
    assert [L2RConfig(scoring=s).kind for s in ("dot", "cosine", "sips")] == [
        "l2r_dot",
        "l2r_cosine",
        "l2r_sips",
    ]


@pytest.mark.parametrize("kind", router_names())
def test_routers_hold_no_linear_layer_that_an_engine_would_replace(kind):
    router = build_router(kind, hidden_size=16, num_experts=4, top_k=2)
    assert [name for name, m in router.named_modules() if isinstance(m, torch.nn.Linear)] == []


@pytest.mark.parametrize("bias", [False, True])
def test_bare_weights_are_those_of_a_linear_layer_under_the_same_seed(bias):
    torch.manual_seed(3)
    bare = BareLinear(12, 5, bias=bias)
    torch.manual_seed(3)
    linear = torch.nn.Linear(12, 5, bias=bias)
    ours, theirs = bare.state_dict(), linear.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", router_names())
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_parameters_are_float32_or_wider_whatever_the_default_dtype(kind, default):
    options = {"rank": 2} if "l2r" in kind else {}
    plain = build_router(kind, hidden_size=16, num_experts=4, top_k=2, **options)
    torch.manual_seed(0)
    torch.set_default_dtype(default)
    try:
        router = build_router(kind, hidden_size=16, num_experts=4, top_k=2, **options)
        assert torch.get_default_dtype() == default
        with pytest.raises(ValueError, match="top_k"):
            build_router(kind, hidden_size=16, num_experts=4, top_k=5, **options)
        assert torch.get_default_dtype() == default
    finally:
        torch.set_default_dtype(torch.float32)
    wide = torch.promote_types(default, torch.float32)
    assert {t.dtype for t in (*router.parameters(), *router.buffers())} == {wide}
    assert plain.state_dict().keys() == router.state_dict().keys()


TRIED = {16: (4, 8), 64: (1, 16), 256: (1, 8), 1024: (1, 32)}  # experts: heads, rank


@pytest.mark.parametrize(
    ("num_experts", "heads", "rank"),
    [
        *((tried, *setting) for tried, setting in TRIED.items()),
        *((2, *TRIED[16]), (4096, *TRIED[1024])),  # below and above all that were tried
        *((between, 1, 16) for between in (17, 63, 65, 128, 255)),
        *((between, 1, 32) for between in (257, 1023)),
    ],
)
def test_an_untried_number_of_experts_has_one_anchor_and_the_larger_rank_of_its_neighbors(
    num_experts, heads, rank
):
    sizes = {"num_experts": num_experts, "hidden_size": 128, "top_k": 2}
    config = L2RConfig.for_experts(**sizes)
    assert config == L2RConfig(gamma=4.0, rank=rank, heads=heads, normalize_weights=True)
    assert build_router(config, **sizes).anchors.shape == (num_experts, heads, rank)


def test_the_setting_for_experts_builds_where_sizes_are_small_and_names_impossible_ones():
    small = {"num_experts": 300, "hidden_size": 4, "top_k": 1}
    config = L2RConfig.for_experts(**small)
    assert (config.rank, config.normalize_weights) == (4, False)
    build_router(config, **small)
    for name, value in (("num_experts", 0), ("hidden_size", 0), ("top_k", 301)):
        with pytest.raises(ValueError, match=f"top_k <= num_experts; got .*{name}={value}"):
            L2RConfig.for_experts(**{**small, name: value})


@pytest.mark.parametrize("sizes", [(), (8,), (8, 64)])
def test_the_setting_for_experts_names_sizes_that_are_missing(sizes):
    with pytest.raises(l2r.InputError, match=r"must all be given, .*; got num_experts=") as e:
        L2RConfig.for_experts(*sizes)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("sizes", [("8", 64, 2), (8, 64.0, 2), (8, 64, "2")])
def test_the_setting_for_experts_names_sizes_that_are_not_whole_numbers(sizes):
    message = r"must be whole numbers; got num_experts='?8'?, hid"
    with unchecked(), pytest.raises(l2r.InputError, match=message):
        L2RConfig.for_experts(*sizes)


@pytest.mark.parametrize("trains", [True, False])
def test_a_learned_temperature_trains_after_it_was_lifted_as_before(trains):
    """FSDP2 wants vectors; what somebody froze stays frozen."""
    config = L2RConfig(rank=2, heads=2, learn_temperature=True)
    router = build_router(config, hidden_size=16, num_experts=4, top_k=2)
    router.log_temperature.requires_grad_(trains)
    router.lift_scalars()
    assert router.log_temperature.shape == (1,)
    assert router.log_temperature.requires_grad is trains


def test_running_statistics_of_several_ranks_are_those_of_all_their_tokens(monkeypatch):
    """A rank of 5 tokens beside one of 3, whose sums are added where ranks would add theirs."""
    own, other = torch.randn(5, 4), 3 + 2 * torch.randn(3, 4)
    totals = []

    def added(sums):
        if not totals:
            theirs = torch.cat([torch.tensor([3.0]), other.sum(dim=0)])
        else:
            theirs = (other - totals[0][1:] / totals[0][0]).square().sum(dim=0)
        totals.append(sums + theirs)
        return totals[-1]

    monkeypatch.setattr("l2r.routers.norms._over_ranks", added)
    norm = QueryBatchNorm(4, momentum=1.0).train()
    mean, var = norm.statistics(own)
    every = torch.cat([own, other])
    torch.testing.assert_close(mean, every.mean(dim=0))
    torch.testing.assert_close(var, every.var(dim=0, unbiased=False))
    torch.testing.assert_close(norm.running_mean, every.mean(dim=0))
    torch.testing.assert_close(norm.running_var, every.var(dim=0))
