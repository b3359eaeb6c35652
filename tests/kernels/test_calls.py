"""No call of a kernel reads or writes past its tensors: what does not fit is refused by name."""

import math
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_cases import Case
from torch import Tensor

from l2r.functional.scoring import ScoreConstants
from l2r.kernels import checks, cpu, dispatch
from l2r.kernels.contract import INPUTS, SCORINGS, Tensors
from l2r.kernels.native.build import library

pytestmark = pytest.mark.usefixtures("unchecked")
CASES = int(os.environ.get("L2R_FUZZ", "40"))
CASE = Case(3, 8, 4, 2, 2, 2)
ROUTER = ("x", "weight", "gain", "anchors")
CALLS = [  # what is given, and whether experts are selected
    (("logits",), True),
    (ROUTER, False),
    (ROUTER, True),
    (("x", "weight", "anchors"), False),
    (("x", "weight", "anchors"), True),
]


def everything(case: Case, seed: int = 0) -> dict[str, Tensor]:
    """All that may be given, of the sizes of a case."""
    x, weight, gain, anchors = case.inputs("cpu").values()
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(case.tokens, case.experts, generator=draw)
    return {"x": x, "weight": weight, "gain": gain, "anchors": anchors, "logits": logits}


def forward(given: dict[str, Any], top_k: int, name: str = "cpu", scoring: str = "sips") -> Tensors:
    """Results of the registered operation, absent ones as None."""
    inputs = Tensors(**given)
    constants = list(CASE.score()[1:])
    results = torch.ops.l2r.route(*inputs[:INPUTS], scoring, constants, top_k, False, name)
    logits, *others = [None if tensor.dim() == 3 else tensor for tensor in results]
    assert (logits is None) is (inputs.logits is not None)
    logits = inputs.logits if logits is None else logits
    return Tensors(*inputs[: INPUTS - 1], logits, *others)


def backward(tensors: Tensors, up: dict[str, Any], top_k: int, name: str = "cpu") -> list[Tensor]:
    """Gradients by the registered operation."""
    ups = [up.get(key) for key in ("logits", "weights")]
    constants = list(CASE.score()[1:])
    return torch.ops.l2r.route_backward(*tensors, *ups, "sips", constants, top_k, False, name, True)


def upstream(done: Tensors, top_k: int) -> dict[str, Tensor]:
    """Ones for the last results."""
    both = {"logits": torch.ones_like(done.logits)}
    return {**both, "weights": torch.ones_like(done.weights)} if top_k else both


@pytest.mark.parametrize("name", ["cpu", "triton"])
@pytest.mark.parametrize(("stages", "selects"), CALLS, ids=str)
def test_right_calls_pass_forward_and_backward(name, stages, selects):
    tensors = everything(CASE)
    given = {key: tensors[key] for key in stages}
    top_k = 2 if selects else 0
    done = forward(given, top_k, name)
    grads = backward(done, upstream(done, top_k), top_k, name)
    for key, grad in zip(Tensors._fields[:INPUTS], grads, strict=True):
        assert grad.shape == (given[key].shape if key in given else (0, 0, 0))


def wrong(tensor: Tensor) -> list[Tensor]:
    """Tensors that must not be taken in the place of a right one; the first is of its rank."""
    return [
        torch.randn(*[size + 1 for size in tensor.shape]),
        torch.randn(0, 3) if tensor.dim() == 1 else torch.randn(0),
        tensor[None],
        tensor[None][:, :0],
        tensor[0] if tensor.dim() > 1 else torch.tensor(1.0),
        tensor.to("meta"),
        tensor.double(),
        tensor.int(),
        torch.complex(tensor, tensor),
    ]


@pytest.mark.parametrize("name", ["cpu", "triton"])
@pytest.mark.parametrize(("stages", "selects"), CALLS, ids=str)
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(name, stages, selects):
    tensors = everything(CASE)
    given = {key: tensors[key] for key in stages}
    for key in stages:
        label = "projection" if key == "weight" else key
        alone = stages == ("logits",)  # have the size and the device they have
        for bad in wrong(given[key]):
            if alone and (bad.shape == (4, 5) or bad.is_meta):
                continue
            with pytest.raises(ValueError, match="must be") as refused:
                forward({**given, key: bad}, 2 if selects else 0, name)
            names = [label, *("projection" if k == "weight" else k for k in stages)]
            assert any(n in str(refused.value) for n in names)


def logits_of(tensors: dict[str, Tensor], **others: Tensor | None) -> Tensor:
    x, *weights = ({**tensors, **others}[name] for name in ROUTER)
    return dispatch.route_logits(x, tuple(weights), ScoreConstants("sips"))


@pytest.mark.parametrize(
    "call",
    [
        lambda t: logits_of(t, x=torch.randn(4, 80000), weight=torch.randn(8, 80000, 0)),
        lambda t: logits_of(t, x=torch.randn(0, 5, 8)),
        lambda t: logits_of(t, gain=t["gain"].to("meta")),
        lambda t: logits_of(t, weight=torch.randn(0, 8), anchors=torch.randn(4, 2, 0)),
        lambda t: logits_of(t, x=torch.randn(3, 0), weight=torch.randn(2, 0), gain=None),
        lambda t: logits_of(t, anchors=torch.randn(0, 2, 2)),
        lambda t: logits_of(t, anchors=torch.randn(4, 0, 2)),
        lambda t: logits_of(t, anchors=torch.randn(4, 2, 3)),
        lambda t: logits_of(t, gain=torch.randn(2)),
        lambda t: dispatch.softmax_top_k(torch.randn(3, 0), 1),
        lambda t: dispatch.softmax_top_k(torch.randn(40, 500), 0),
        lambda t: dispatch.softmax_top_k(torch.randn(40, 500), -1),
        lambda t: dispatch.softmax_top_k(torch.randn(40, 500), 2**70),
        lambda t: dispatch.softmax_top_k(torch.randn(2, 40, 500), 2),
        lambda t: dispatch.softmax_top_k(torch.randn(20000), 2),
        lambda t: logits_of(t, gain=t["gain"].double()),
    ],
)
@pytest.mark.parametrize("name", ["cpu", "plain", "triton"])
def test_public_calls_refuse_what_does_not_fit_in_every_form(call, name):
    with dispatch.implementation(name), pytest.raises(ValueError, match=r"must be .*; got"):
        call(everything(CASE))


@pytest.mark.parametrize(
    ("given", "top_k", "words"),
    [
        ({}, 0, "x or logits must be given"),
        ({"x"}, 0, "projection must be given with x"),
        ({"weight"}, 0, "x must be given with projection"),
        ({"gain", "logits"}, 2, "x must be given with gain"),
        ({"anchors"}, 0, "x must be given with anchors"),
        ({"anchors", "logits"}, 2, "x must be given with anchors"),
        ({"x", "weight"}, 0, "anchors must be given with x"),
        ({"x", "weight"}, 2, "anchors must be given with x"),
        ({"x", "weight", "anchors", "logits"}, 0, "logits must not be given with x"),
        ({"logits"}, 0, "top_k must be between 1 and 4; got top_k=0"),
        ({"logits"}, -1, "top_k must be between 1 and 4; got top_k=-1"),
        ({"logits"}, 5, "top_k must be between 1 and 4; got top_k=5"),
        ({"x", "weight", "anchors"}, -3, "top_k must be between 1 and 4; got top_k=-3"),
    ],
    ids=lambda v: str(v) if isinstance(v, str | int) else "+".join(sorted(v)),
)
def test_tensors_that_are_missing_or_one_too_many_are_refused(given, top_k, words):
    tensors = everything(CASE)
    with pytest.raises(ValueError, match=words):
        forward({key: tensors[key] for key in given}, top_k)


def test_options_of_the_operation_are_checked():
    tensors = everything(CASE)
    given = {key: tensors[key] for key in ROUTER}
    with pytest.raises(ValueError, match="scoring must be one of dot, cosine, sips; got 'cosinus'"):
        forward(given, 0, scoring="cosinus")
    with pytest.raises(ValueError, match="backend must be one of cpu, triton; got 'cuda'"):
        forward(given, 0, "cuda")
    with pytest.raises(ValueError, match="constants must be 6 numbers; got"):
        torch.ops.l2r.route(*Tensors(**given)[:INPUTS], "sips", [1.0, 2.0], 0, False, "cpu")


BEYOND = [
    (Case(1, 2, 1025, 1, 2, 1), "N"),
    (Case(1, 2, 2, 65, 2, 1), "H"),
    (Case(1, 2, 2, 1, 65, 1), "R"),
]


@pytest.mark.parametrize(("case", "letter"), BEYOND, ids=["experts", "anchors", "rank"])
def test_sizes_beyond_the_gpu_kernels_run_plain_code_and_are_refused_by_the_operation(
    monkeypatch, case, letter
):
    """On faked facts: the device says Triton, and what would launch records that it was asked."""
    launched = []
    monkeypatch.setattr(dispatch, "_named_for", lambda tensor: "triton")
    monkeypatch.setattr(dispatch, "run", lambda *call: launched.append(call) or call[2])
    tensors = everything(case)
    parts = (tensors["weight"], None, tensors["anchors"])
    assert dispatch.route_logits(tensors["x"], parts, ScoreConstants()).shape == (1, case.experts)
    assert not launched
    name, most = {"N": ("num_experts", 1024), "H": ("heads", 64), "R": ("rank", 64)}[letter]
    with pytest.raises(ValueError, match=f"{name} must be <= {most} for triton; got"):
        forward({key: tensors[key] for key in ("x", "weight", "anchors")}, 0, "triton")
    logits_of(everything(Case(1, 2, 1024, 1, 64, 1)))
    assert len(launched) == 1


def test_sizes_that_gpu_kernels_cannot_count_are_beyond_them():
    """No memory is behind these tensors, as none is behind an expanded one."""
    one, row = torch.zeros(1, 1), torch.zeros(1, 2)
    assert not checks.beyond_triton(Tensors(row.expand(2**30, 2), row))
    assert "tokens must be <=" in checks.beyond_triton(Tensors(row.expand(2**31 - 5, 2), row))
    assert "tokens must be <=" in checks.beyond_triton(Tensors(logits=row.expand(2**40, 2)))
    wide = one.expand(64, 2**26)
    assert "projection must have <=" in checks.beyond_triton(Tensors(one.expand(1, 2**26), wide))


def saved(stages: tuple[str, ...], selects: bool) -> tuple[Tensors, dict[str, Tensor], int]:
    """What a backward is given."""
    tensors, top_k = everything(CASE), 2 if selects else 0
    given = {key: tensors[key] for key in stages}
    done = forward(given, top_k)
    return done, upstream(done, top_k), top_k


@pytest.mark.parametrize("name", ["cpu", "triton"])
@pytest.mark.parametrize(("stages", "selects"), CALLS, ids=str)
def test_a_backward_refuses_what_its_forward_did_not_give(name, stages, selects):
    done, up, top_k = saved(stages, selects)
    for key, tensor in done._asdict().items():
        if tensor is None:
            continue
        with pytest.raises(ValueError, match="must"):  # a wrong shape
            backward(done._replace(**{key: tensor[None]}), up, top_k, name)
        if key != "gain":  # which may be absent
            with pytest.raises(ValueError, match="must"):
                backward(done._replace(**{key: None}), up, top_k, name)
        other = torch.float32 if key == "indices" else torch.float64
        with pytest.raises(ValueError, match="must"):
            backward(done._replace(**{key: tensor.to(other)}), up, top_k, name)
    for key, tensor in up.items():
        for bad in (tensor[:1], tensor.half(), tensor.to("meta"), tensor[None]):
            with pytest.raises(ValueError, match=f"the gradient of {key} must be"):
                backward(done, {**up, key: bad}, top_k, name)
    with pytest.raises(ValueError, match=r"the gradient of .* must be given"):
        backward(done, {}, top_k, name)


@pytest.mark.parametrize("index", [-1, 4, 2**40, -(2**63)])
@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_indices_of_experts_that_are_not_there_are_refused(name, index):
    done, up, top_k = saved(("logits",), True)
    done.indices[1, 0] = index
    with pytest.raises(ValueError, match=f"indices must be between 0 and 3; got {index}"):
        backward(done, up, top_k, name)


def test_indices_changed_behind_autograd_are_refused():
    inputs = CASE.inputs("cpu")
    x, *parts = inputs.values()
    x.requires_grad_()
    _, weights, indices = dispatch.route(x, tuple(parts), ScoreConstants("sips"), top_k=2)
    indices.numpy()[:] = 10**6
    with pytest.raises(ValueError, match="indices must be between 0 and 3; got 1000000"):
        weights.sum().backward()


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
def test_memory_that_was_given_back_is_not_read():
    """As a parameter looks that FSDP has put away: its size is there, its storage is not."""
    x, *parts = CASE.inputs("cpu").values()
    parts[1].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="gain must have memory; got a freed storage"):
        dispatch.route(x, tuple(parts), ScoreConstants("sips"), top_k=2)


@pytest.mark.skipif(library() is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", ["l2r_forward", "l2r_backward"])
def test_the_compiled_code_reports_that_memory_ran_out(name):
    """An exception must not leave C++: it would end the process."""
    spare = torch.zeros(1)
    places = [spare.data_ptr() if f == "anchors" else 0 for f in Tensors._fields]
    sizes, score = (0, 1, 2**30, 2**15, 2**10, 0, 0), (SCORINGS["sips"], *ScoreConstants()[1:])
    more = [] if name == "l2r_forward" else [cpu._pointers(*places)] * 2
    assert getattr(library(), name)(cpu._call(*sizes, *score, 1, 0, *places), *more) != 0


def test_expanded_and_strided_memory_is_read_right():
    tensors = everything(CASE)
    row = torch.randn(1, 8)
    parts = (tensors["weight"].t().contiguous().t(), None, tensors["anchors"][:1].expand(4, -1, -1))
    dense = (tensors["weight"], None, parts[2].contiguous())
    found = dispatch.route(row.expand(3, -1), parts, ScoreConstants("sips"), top_k=4)
    wanted = dispatch.route(row, dense, ScoreConstants("sips"), top_k=4)
    assert torch.equal(found[0], wanted[0].expand(3, -1))
    assert found[2].tolist() == [[0, 1, 2, 3]] * 3


def test_an_empty_batch_has_empty_results_and_zero_gradients():
    x, weight, gain, anchors = Case(0, 8, 4, 2, 2, 2).inputs("cpu").values()
    leaves = [tensor.requires_grad_() for tensor in (weight, gain, anchors)]
    logits, weights, indices = dispatch.route(x, tuple(leaves), ScoreConstants("sips"), top_k=2)
    assert (logits.shape, weights.shape, indices.shape) == ((0, 4), (0, 2), (0, 2))
    (logits.sum() + weights.sum()).backward()
    assert all(leaf.grad.abs().sum() == 0 for leaf in leaves)


BORDERS = [1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Case, tuple[str, ...], bool, int]:
    """A right call of any stages, at the borders of blocks and with several threads."""
    size = st.sampled_from(BORDERS)
    stages, selects = draw(st.sampled_from(CALLS))
    experts = draw(size)
    case = Case(
        tokens=draw(st.sampled_from([1, 2, 15, 16, 17, 33])),
        hidden=draw(st.sampled_from([*BORDERS, 700])),
        experts=experts,
        heads=draw(st.integers(1, 9)),
        rank=draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9])),
        top_k=draw(st.integers(1, experts)),
        seed=draw(st.integers(0, 99)),
        scale=draw(st.sampled_from([0.0, 1.0, 40.0, math.inf])),
    )
    return case, stages, selects, draw(st.integers(1, 3))


@given(problem=problems(), damage=st.integers(0, 40), place=st.integers(0, 10))
@settings(max_examples=CASES)
def test_any_call_is_answered_or_refused(problem, damage, place):
    """A third of the calls has one tensor of other sizes; under `make sanitize`, with addresses
    checked."""
    case, stages, selects, threads = problem
    tensors = everything(case)
    given = {key: tensors[key] for key in stages}
    top_k = case.top_k if selects else 0
    torch.set_num_threads(threads)
    if damage < 14:
        key = stages[place % len(stages)]
        bad = wrong(given[key])
        given[key] = bad[damage % len(bad)]
    try:
        done = forward(given, top_k)
    except ValueError:
        assert damage < 14
        return
    grads = backward(done, upstream(done, top_k), top_k)
    shapes = dict(zip(Tensors._fields[:INPUTS], [grad.shape for grad in grads], strict=True))
    assert all(shapes[key] == tensor.shape for key, tensor in given.items())


@given(
    problem=problems(),
    damage=st.integers(0, 8),
    place=st.integers(0, 10),
    top_k=st.integers(-1, 70),
)
@settings(max_examples=60)
def test_the_quick_look_and_the_walk_agree(problem, damage, place, top_k):
    """A call that the quick look takes is one in which the walk finds nothing, and the reverse."""
    case, stages, selects, _ = problem
    given = {key: everything(case)[key] for key in stages}
    key = stages[place % len(stages)]
    if damage < 6:
        given[key] = wrong(given[key])[damage]
    tensors, wanted = Tensors(**given), top_k if selects else None
    try:
        checks.walk(tensors, wanted)
        refused = False
    except ValueError:
        refused = True
    assert checks.fits(tensors, wanted) is not refused
