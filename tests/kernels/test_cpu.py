"""The CPU backend equals float64 plain code, compiled and as torch operations."""

from contextlib import nullcontext, suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from routing_cases import Case, cases, check_logits, check_route, leaves, route
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from l2r.functional.scoring import ScoreConstants
from l2r.kernels import cpu, dispatch
from l2r.kernels.contract import Sizes, Tensors
from l2r.kernels.dispatch import implementation
from l2r.kernels.native.build import library

quick = settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
EDGES = [
    Case(0, 8, 4, 2, 2, 2),
    Case(1, 8, 4, 2, 2, 2),
    Case(1, 1, 1, 1, 1, 1),
    Case(400, 700, 20, 3, 2, 4),
    Case(33, 17, 5, 3, 2, 5, normalize=True),
    Case(5, 65, 1500, 2, 3, 8),
    Case(30, 70, 130, 3, 64, 3),
    Case(40, 20, 6, 4, 2, 2, scoring="dot", scale=30.0),
    # By blocks of tokens: several blocks, panels of D and of N, a rest of each, with and without
    # exponentials that need a maximum.
    Case(101, 300, 150, 3, 9, 4),
    Case(60, 259, 300, 1, 16, 4, scoring="cosine", gain=False),
    Case(50, 40, 20, 3, 8, 2, scoring="dot", scale=30.0),
    Case(49, 128, 64, 4, 33, 8, normalize=True),
    Case(33, 64, 16, 2, 8, 2, scoring="dot", scale=40.0),  # two anchors whose exponentials overflow
]


@pytest.fixture(params=["compiled", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms of the backend; the compiled one where a compiler is found."""
    if request.param == "torch":
        monkeypatch.setattr(cpu, "library", lambda: None)
    return str(request.param)


@given(case=cases(max_tokens=60))
@quick
def test_route_equals_plain_float64(form: str, case: Case) -> None:
    check_route("cpu", "cpu", case)


@given(case=cases(max_tokens=60))
@quick
def test_logits_equal_plain_float64(form: str, case: Case) -> None:
    check_logits("cpu", "cpu", case)


@pytest.mark.parametrize("case", EDGES, ids=str)
def test_route_equals_plain_float64_at_the_edges(form: str, case: Case) -> None:
    check_route("cpu", "cpu", case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", EDGES, ids=str)
def test_without_gradients_the_numbers_are_the_same(
    form: str, case: Case, dtype: torch.dtype
) -> None:
    inputs = case.inputs("cpu")
    inputs = {**inputs, "x": inputs["x"].to(dtype)}
    with torch.no_grad():
        alone = route(inputs, **case.options())
    trained = route(leaves(inputs), **case.options())
    for name in ("logits", "weights", "indices"):
        assert torch.equal(getattr(alone, name), getattr(trained, name)), name


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 65, 9, 1, 2, 2),
        Case(30, 300, 16, 4, 3, 4),
        Case(5, 48, 7, 2, 32, 3),  # fewer tokens than a block
        Case(101, 70, 13, 3, 9, 4),
        Case(60, 600, 20, 1, 8, 2),  # several parts of a row
    ],
    ids=str,
)
def test_bf16_hidden_states_give_the_bits_of_their_copy_in_fp32(
    form: str, case: Case, replayed: bool
) -> None:
    routes = torch.arange(case.tokens * case.top_k).view(case.tokens, -1) % case.experts
    routes[::3] = -1
    options = case.options() | ({"routes": routes} if replayed else {})
    inputs = case.inputs("cpu")
    x = inputs["x"].bfloat16()
    results = []
    for hidden_states in (x, x.float()):
        ours = leaves({**inputs, "x": hidden_states})
        trained = route(ours, **options)
        with torch.no_grad():
            alone = route({**inputs, "x": hidden_states}, **options)
        (trained.weights.square().sum() + trained.logits.sin().sum()).backward()
        grads = {name: leaf.grad for name, leaf in ours.items()}
        grads["x"] = grads["x"].bfloat16()
        outputs = [
            getattr(r, n) for r in (trained, alone) for n in ("logits", "weights", "indices")
        ]
        results.append([*outputs, *grads.values()])
    assert results[0][-1].dtype is torch.float32
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [64, 150])
@pytest.mark.parametrize(("rank", "heads"), [(2, 4), (7, 1), (8, 1), (16, 3), (33, 1), (64, 2)])
def test_a_token_has_the_same_bits_among_any_number_of_others(
    rank: int, heads: int, hidden: int, dtype: torch.dtype
) -> None:
    """As when it is decoded and when it stood in a prompt, or in a batch of training."""
    case = Case(120, hidden, 40, heads, rank, 8)
    inputs = case.inputs("cpu")
    inputs = {**inputs, "x": inputs["x"].to(dtype)}
    whole = route(leaves(inputs), **case.options())
    for count in (1, 2, 3, 7, 8, 24, 25, 49, 119):
        with torch.no_grad():
            part = route({**inputs, "x": inputs["x"][-count:].contiguous()}, **case.options())
        for name in ("logits", "weights", "indices"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[-count:]), (name, count)


def test_a_gradient_is_rounded_to_bf16_as_torch_rounds(form: str) -> None:
    """Ties, the largest numbers, infinities and NaN among the gradients of hidden states."""
    case = Case(16, 64, 8, 1, 8, 2)
    inputs = case.inputs("cpu")
    scales = torch.tensor([1.0, 1e-42, 1e-20, 1e20, 3e38, float("inf"), float("nan"), 0.0])
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        ours = leaves({**inputs, "x": inputs["x"].bfloat16().to(dtype)})
        logits = route(ours, **case.options()).logits
        (logits * scales.repeat(2).unsqueeze(1)).sum().backward()
        results.append(ours["x"].grad.bfloat16())
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scoring", ["dot", "cosine", "sips"])
@pytest.mark.parametrize("heads", [1, 3])
def test_every_score_equals_plain_float64(form: str, scoring: str, heads: int) -> None:
    check_logits("cpu", "cpu", Case(19, 33, 17, heads, 2, 2, scoring=scoring))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rank", [2, 8])
def test_same_numbers_every_time(form: str, threads: int, rank: int) -> None:
    torch.set_num_threads(threads)
    case = Case(300, 600, 16, 4, rank, 4)
    results = []
    for _ in range(2):
        ours = leaves(case.inputs("cpu"))
        routed = route(ours, **case.options())
        (routed.weights.sum() + routed.logits.sin().sum()).backward()
        results.append([routed.logits, routed.indices, *(leaf.grad for leaf in ours.values())])
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("rank", [2, 8])
def test_nan_input_stays_in_its_token(form: str, rank: int) -> None:
    inputs = Case(10, 12, 7, 2, rank, 3).inputs("cpu")
    inputs["x"][2] = float("nan")
    inputs["x"].requires_grad_()
    routed = route(inputs, score=ScoreConstants("sips"), top_k=3)
    assert bool(((routed.indices >= 0) & (routed.indices < 7)).all())
    routed.logits.sum().backward()
    for values in (routed.logits, inputs["x"].grad):
        rows = torch.isnan(values).any(dim=1).nonzero().flatten().tolist()
        assert rows == [2]


def test_without_a_compiler_torch_operations_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("L2R_CPU_KERNEL", "off")
    assert library.__wrapped__() is None
    monkeypatch.setenv("L2R_CPU_KERNEL", "on")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert library.__wrapped__() is None


def test_no_score_tensor_lives_in_memory() -> None:
    """Peak extra memory of forward and backward stays below one [T, N, H] tensor."""
    from benchmarks.memory import peak_bytes

    case = Case(2048, 64, 64, 16, 2, 8)
    ours = leaves(case.inputs("cpu"))

    def step(_: int) -> None:
        routed = route(ours, **case.options())
        torch.autograd.grad(routed.weights.sum() + routed.logits.sum(), list(ours.values()))

    assert peak_bytes(step, "cpu") < 4 * case.tokens * case.experts * case.heads / 2


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("projection", (2, 9), r"projection must be \[R, 8\]"),
        ("gain", (7,), r"gain must be \[8\]"),
        ("anchors", (4, 2, 3), r"anchors must be \[N, H, 2\]"),
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_sizes_that_do_not_fit_are_refused(
    unchecked: None, name: str, shape: tuple[int, ...], message: str, grad: bool
) -> None:
    inputs = Case(3, 8, 4, 2, 2, 2).inputs("cpu")
    inputs[name] = torch.randn(shape, requires_grad=grad)
    with pytest.raises(ValueError, match=message):
        route(inputs, score=ScoreConstants("sips"), top_k=2)


def test_more_choices_than_experts_are_refused(unchecked: None) -> None:
    with pytest.raises(ValueError, match="top_k must be between 1 and 4"):
        route(Case(3, 8, 4, 2, 2, 2).inputs("cpu"), score=ScoreConstants("sips"), top_k=5)


def test_a_strided_gain_is_read_right() -> None:
    inputs = Case(3, 8, 4, 2, 2, 2).inputs("cpu")
    strided = {**inputs, "gain": torch.stack([inputs["gain"], inputs["gain"]], 1)[:, 0]}
    found, wanted = (route(i, score=ScoreConstants("sips"), top_k=2) for i in (strided, inputs))
    assert torch.equal(found.logits, wanted.logits)


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("scoring", ["dot", "sips"])
def test_a_long_query_changes_nothing_in_the_rest_of_its_block(scoring: str) -> None:
    """Its exponentials need a maximum, those of the others do not."""
    inputs = Case(40, 30, 20, 3, 8, 2, scoring=scoring).inputs("cpu")
    options = {"score": ScoreConstants(scoring), "top_k": 2}
    loud = {**inputs, "x": inputs["x"].clone(), "gain": None}
    quiet = {**inputs, "gain": None}
    loud["x"][7] *= 1e4
    others = torch.arange(40) != 7
    found, wanted = (route(i, **options).logits[others] for i in (loud, quiet))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("rank", [2, 8])
def test_several_threads_give_the_right_sums(form: str, threads: int, rank: int) -> None:
    torch.set_num_threads(threads)
    case = Case(300, 600, 16, 4, rank, 4)
    assert cpu._threads(Sizes(300, 600, 2, 16, 4)) == threads
    check_route("cpu", "cpu", case)
    torch.set_num_threads(1)


def test_compiled_code_is_for_the_memory_of_this_machine() -> None:
    # On meta as on a GPU, whose tensors the guard may send here.
    for place, wanted in (("cpu", library() is not None), ("meta", False)):
        shapes = ((3, 8), (2, 8), (8,), (4, 1, 2))
        given = Tensors(*[torch.empty(shape, device=place) for shape in shapes])
        assert cpu._compiled(given, Sizes(3, 8, 2, 4, 1)) is wanted
        half = given._replace(x=given.x.bfloat16())
        assert cpu._compiled(half, Sizes(3, 8, 2, 4, 1)) is wanted


def decode(inputs: dict[str, torch.Tensor | None], **options: object) -> None:
    route(inputs, **{"score": ScoreConstants("sips"), "top_k": 2, **options})


SITUATIONS = {
    "a gradient": lambda i: (torch.enable_grad(), i),
    "fake tensors": lambda i: (FakeTensorMode(allow_non_fake_inputs=True), i),
    "a dispatch mode": lambda i: (FlopCounterMode(display=False), i),
    "forward-mode derivatives": lambda i: (torch.autograd.forward_ad.dual_level(), i),
    "plain code": lambda i: (implementation("plain"), i),
    "bf16 parameters": lambda i: (nullcontext(), i | {"anchors": i["anchors"].bfloat16()}),
    "an expanded x": lambda i: (nullcontext(), i | {"x": i["x"].expand(3, -1)}),
    "a gain on another device": lambda i: (nullcontext(), i | {"gain": i["gain"].to("meta")}),
    "x in fp16": lambda i: (nullcontext(), i | {"x": i["x"].half()}),
    "a tensor subclass": lambda i: (nullcontext(), i | {"x": i["x"].as_subclass(Subclass)}),
}


class Subclass(torch.Tensor):
    """A tensor that is not torch's own."""


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("situation", SITUATIONS)
def test_only_a_plain_call_without_gradients_is_inferred(
    unchecked: None, monkeypatch: pytest.MonkeyPatch, situation: str
) -> None:
    """``cpu.infer`` reads addresses: whatever watches or changes tensors goes the longer way."""
    answers = []
    infer = cpu.infer
    monkeypatch.setattr(cpu, "infer", lambda *call: answers.append(infer(*call)) or answers[-1])
    inputs = Case(1, 8, 4, 2, 2, 2).inputs("cpu")
    with torch.no_grad():
        decode(inputs)
        assert answers and answers[0] is not None
        answers.clear()
        around, changed = SITUATIONS[situation](inputs)
        with around, suppress(ValueError):
            decode(changed)
    assert all(answer is None for answer in answers)


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
def test_under_a_transform_nothing_is_inferred(unchecked: None, monkeypatch) -> None:
    monkeypatch.setattr(cpu, "infer", lambda *_: pytest.fail("addresses were read"))
    x, *weights = Case(3, 8, 4, 2, 2, 2).inputs("cpu").values()

    def logits(x: torch.Tensor) -> torch.Tensor:
        return dispatch.route(x, tuple(weights), ScoreConstants("sips"), top_k=2)[0]

    with torch.no_grad():
        torch.func.vmap(logits)(x[:, None])
