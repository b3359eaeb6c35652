"""A GPU kernel that is wrong, does not compile or does not fit is not used: torch code runs.

The kernels are the real ones, in Triton's interpreter where there is no GPU, and are broken on
purpose.
"""

import warnings

import pytest
import torch
import triton
import triton.language as tl
from routing_cases import Case, double, error, leaves, route
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.errors import OutOfResources

from l2r.kernels import dispatch, guard, operation, plain
from l2r.kernels.dispatch import implementation
from l2r.kernels.triton import blocks, launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASE = Case(5, 12, 7, 2, 2, 3)
HALF = 0.5  # of the limit


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A process that has not called a kernel yet."""
    monkeypatch.delenv("L2R_GUARD", raising=False)
    operation.backend.cache_clear()
    monkeypatch.setattr(guard, "verdicts", {})
    yield
    operation.backend.cache_clear()


@triton.jit
def identity(x):
    return x


@triton.jit
def column_zero_alone(block, index, RP: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, RP)[None, :] == index * 0, block, 0.0), 1)


def break_tanh(monkeypatch) -> None:
    """A wrong kernel; compiled ones hold what they were made of, their results are scaled."""
    if DEVICE == "cpu":
        monkeypatch.setattr(blocks, "tanh", identity)
        return
    forward = launch.forward

    def scaled(given, options):
        done = forward(given, options)
        return done if done.logits is None else done._replace(logits=done.logits * 1.05)

    monkeypatch.setattr(launch, "forward", scaled)


def step(case: Case = CASE, *, routed: bool = False) -> tuple[dict[str, torch.Tensor], float]:
    """Results and gradients of a routed batch, and their largest error against float64."""
    inputs = case.inputs(DEVICE)
    routes = None
    if routed:
        order = torch.rand(case.tokens, case.experts).argsort(dim=1)
        routes = order[:, : case.top_k].contiguous().to(DEVICE)
    ours, exact = leaves(inputs), double(inputs)
    with implementation("triton"):
        made = route(ours, **case.options(), routes=routes)
    wanted = route(exact, plain, **case.options(), routes=routes)
    errors = []
    for result in (made, wanted):
        (result.logits.double().sin().sum() + result.weights.double().square().sum()).backward()
    errors.append(error(made.logits, wanted.logits))
    errors += [error(leaf.grad, exact[name].grad) for name, leaf in ours.items()]
    return ours, max(errors)


def failing(problem: Exception):
    """A kernel that cannot be launched."""

    class Kernel:
        def __getitem__(self, grid):
            def call(*_, **__):
                raise problem

            return call

    return Kernel()


@pytest.mark.slow("Triton's interpreter")
def test_right_kernels_are_believed_after_one_comparison_per_kind_of_call(monkeypatch):
    asked = []
    compare = guard.compare
    monkeypatch.setattr(guard, "compare", lambda *a: asked.append(a) or compare(*a))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for case in (CASE, CASE, Case(9, 12, 7, 2, 2, 3), Case(5, 12, 7, 2, 16, 3)):
            assert step(case)[1] <= 1e-4
    assert len(asked) == 2  # the number of tokens makes no other kernel
    assert all(verdict.reason == "" for verdict in guard.verdicts.values())


BROKEN = [
    (break_tanh, "differs from plain code by"),
    pytest.param(
        lambda m: m.setattr(blocks, "column", column_zero_alone),
        "differs from plain code by",
        marks=pytest.mark.skipif(DEVICE != "cpu", reason="compiled kernels keep their functions"),
    ),
    (
        lambda m: m.setattr(
            launch.kernels, "project_backward_kernel", failing(RuntimeError("ptxas died"))
        ),
        "RuntimeError: ptxas died",
    ),
    (
        lambda m: m.setattr(
            launch, "forward_kernel", failing(OutOfResources(300_000, 232_448, "shared memory"))
        ),
        "OutOfResources: out of resource: shared memory",
    ),
]


@pytest.mark.parametrize(("damage", "words"), BROKEN, ids=["tanh", "column", "compile", "memory"])
def test_a_broken_kernel_gives_way_to_torch_code_with_one_warning(monkeypatch, damage, words):
    damage(monkeypatch)
    with pytest.warns(RuntimeWarning, match=words) as caught:
        assert step()[1] <= 1e-4
        assert step()[1] <= 1e-4  # a backward does not go back to the kernel
        assert step(Case(5, 12, 7, 2, 3, 3))[1] <= 1e-4  # another kind of call
    assert len(caught) == 1
    said = str(caught[0].message)
    for part in ("l2r 0.", f"torch {torch.__version__}", f"triton {triton.__version__}"):
        assert part in said
    assert "report" in said and "l2r doctor" in said and "L2R_GUARD=off" in said
    assert DEVICE in said


@pytest.mark.parametrize("routed", [False, True])
def test_a_triton_that_cannot_be_imported_gives_way_too(routed, monkeypatch):
    """In the backward of a call with routes as well, for which no routes are kept."""
    monkeypatch.setitem(operation.BACKENDS, "triton", "l2r.kernels.triton.no_such_module")
    with pytest.warns(RuntimeWarning, match="ModuleNotFoundError"):
        assert step(routed=routed)[1] <= 1e-4


def test_without_triton_a_gpu_gets_plain_code_and_no_warning(monkeypatch):
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)

    with FakeTensorMode():
        on_gpu = torch.empty(2, 3, device="cuda")
    assert dispatch._named_for(on_gpu) is None
    assert guard.verdicts == {}


def test_the_guard_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("L2R_GUARD", "off")
    break_tanh(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step()[1] > 1e-2  # wrong, as asked
    monkeypatch.setenv("L2R_GUARD", "perhaps")
    operation.backend.cache_clear()
    guard.verdicts.clear()
    with pytest.raises(ValueError, match="L2R_GUARD must be on or off; got 'perhaps'"):
        step()


@pytest.mark.parametrize("mode", ["autocast", "no_grad", "inference", "default device"])
def test_what_surrounds_the_first_call_does_not_reach_the_comparison(mode):
    inputs = CASE.inputs(DEVICE)
    state = torch.get_rng_state()
    surrounding = {
        "autocast": torch.autocast(DEVICE, dtype=torch.bfloat16),
        "no_grad": torch.no_grad(),
        "inference": torch.inference_mode(),
        "default device": torch.device("meta"),
    }[mode]
    with surrounding, implementation("triton"):
        first = route(inputs, **CASE.options())
    (verdict,) = guard.verdicts.values()
    assert verdict.reason == "" and verdict.error < HALF
    assert torch.equal(torch.get_rng_state(), state)
    with implementation("triton"):
        assert torch.equal(route(inputs, **CASE.options()).logits, first.logits)


def test_a_captured_graph_is_not_interrupted(monkeypatch):
    """During capture nothing may wait for the device; the next call outside of it is compared."""
    monkeypatch.setattr(guard, "_capturing", lambda _: True)
    break_tanh(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    assert guard.verdicts == {}
    monkeypatch.setattr(guard, "_capturing", lambda _: False)
    with pytest.warns(RuntimeWarning, match="differs from plain code"):
        step()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("broken", [False, True])
def test_a_compiled_router_is_compared_when_it_first_runs(monkeypatch, broken):
    if broken:
        break_tanh(monkeypatch)
    inputs = CASE.inputs(DEVICE)
    wanted = route(double(inputs), plain, **CASE.options())
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda values: route(values, **CASE.options()), fullgraph=True, backend="aot_eager"
    )
    with warnings.catch_warnings(record=True) as caught, implementation("triton"):
        warnings.simplefilter("always")
        found = compiled(inputs)
    assert error(found.logits, wanted.logits) <= 1e-4
    said = [w for w in caught if "differs from plain code" in str(w.message)]
    (verdict,) = guard.verdicts.values()  # compiled code calls the kernels
    assert len(said) == bool(verdict.reason) == broken


@pytest.mark.slow("Triton's interpreter")
@pytest.mark.parametrize(
    ("sizes", "scoring", "dtype"),
    [
        ((1, 1, 1, 1, 1), "cosine", torch.float32),  # a gradient that cancels
        ((20, 30, 3, 2, 8), "sips", torch.bfloat16),
        ((33, 7, 3, 5, 7), "dot", torch.float16),
        ((24, 70, 1, 20, 4), "sips", torch.bfloat16),
        ((51, 31, 1, 1, 3), "cosine", torch.float32),
        ((64, 16, 4, 1, 3), "cosine", torch.bfloat16),
        ((1, 8, 1, 16, 2), "dot", torch.bfloat16),
        ((1, 8, 2, 16, 2), "sips", torch.float16),
    ],
    ids=str,
)
def test_right_kernels_pass_with_a_margin_in_every_dtype(sizes, scoring, dtype):
    hidden, experts, heads, rank, top_k = sizes
    for params in {dtype, torch.float32}:
        case = Case(
            3, hidden, experts, heads, rank, top_k, scoring=scoring, x_dtype=dtype, dtype=params
        )
        with implementation("triton"):
            route(case.inputs(DEVICE), **case.options())
    for verdict in guard.verdicts.values():
        assert verdict.reason == "" and verdict.error < HALF, verdict


@pytest.mark.parametrize("part", ["logits", "selection"])
def test_logits_or_a_selection_alone_are_compared_too(part):
    x, *weights = CASE.inputs(DEVICE).values()
    with implementation("triton"):
        if part == "logits":
            dispatch.route_logits(x, tuple(weights), CASE.score())
        else:
            dispatch.softmax_top_k(x, 3, normalize=True)
    (verdict,) = guard.verdicts.values()
    assert verdict.reason == "" and verdict.error < HALF, verdict
