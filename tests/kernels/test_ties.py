"""One rule of order in every backend: largest first, lowest index among equals, NaN as -inf."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from routing_cases import device_of
from torch import Tensor

from l2r.functional import best_experts, select_experts
from l2r.functional.scoring import ScoreConstants
from l2r.kernels import cpu, dispatch, plain
from l2r.kernels.dispatch import implementation
from l2r.kernels.native.build import library
from l2r.routers.selection_rule import Selection
from tests.routers.test_selection_rule import Stub

# From numpy, in the interpreter: rows of -inf and NaN are what is asked for.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
INF, NAN = math.inf, math.nan
FORMS = ["plain", "compiled", "blocks", "triton", "fullgraph"]
LANES = [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way from logits to experts; the C++ form where a compiler is found."""
    if request.param == "compiled" and library() is None:
        pytest.skip("no C++ compiler")
    if request.param == "blocks":
        monkeypatch.setattr(cpu, "library", lambda: None)
    return str(request.param)


def chosen(form: str, logits: Tensor, top_k: int, *, normalize: bool = False) -> Tensor:
    """Indices of the experts that a form chooses."""
    if form == "fullgraph":
        call = torch.compile(plain.softmax_top_k, fullgraph=True, backend="aot_eager", dynamic=True)
        return call(logits, top_k, normalize=normalize)[1]
    name = {"compiled": "cpu", "blocks": "cpu"}.get(form, form)
    with implementation(name):
        return dispatch.softmax_top_k(logits.to(device_of(form)), top_k, normalize=normalize)[1]


def rule(logits: Tensor, top_k: int) -> list[list[int]]:
    """The rule as one line of Python: sorted() keeps the order of equals."""
    rows = [[-INF if math.isnan(value) else value for value in row] for row in logits.tolist()]
    return [sorted(range(len(row)), key=lambda n, row=row: -row[n])[:top_k] for row in rows]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("experts", [8, 17, 64, 67])
def test_equal_logits_are_taken_from_the_lowest_index_at_every_border(form, experts):
    borders = [n for n in LANES if n < experts]
    logits = torch.arange(experts).flip(0).mul(-0.01).repeat(len(borders) + 2, 1)
    for row, border in enumerate(borders):
        logits[row, [border - 1, border, 0, experts - 1]] = 3.0
    logits[-2] = 0.0
    logits[-1] = -INF
    for top_k in (1, 2, 3, min(8, experts - 1), experts):
        assert chosen(form, logits, top_k).tolist() == rule(logits, top_k)


@pytest.mark.usefixtures("unchecked")
def test_not_numbers_come_last_and_infinities_in_order(form):
    logits = torch.tensor(
        [
            [NAN] * 5,
            [1.0, NAN, 2.0, NAN, 1.0],
            [NAN, -INF, 0.0, -INF, NAN],
            [INF, 0.0, INF, -INF, 1.0],
            [-INF] * 5,
            [0.0, -0.0, 0.0, -0.0, 1.0],
        ]
    )
    wanted = [
        [0, 1, 2, 3, 4],
        [2, 0, 4, 1, 3],
        [2, 0, 1, 3, 4],
        [0, 2, 4, 1, 3],
        [0, 1, 2, 3, 4],
        [4, 0, 1, 2, 3],
    ]
    for top_k in (1, 2, 4, 5):
        assert chosen(form, logits, top_k).tolist() == [row[:top_k] for row in wanted]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_decide_where_their_probabilities_are_zero(form, dtype):
    logits = torch.full((2, 20), -300.0, dtype=dtype)
    logits[0, 3], logits[0, 19], logits[0, 11] = 0.0, -200.0, -201.0  # exp(-200) is 0 in fp32
    logits[1, 19], logits[1, 4] = 200.0, 0.0
    assert torch.softmax(logits.float(), 1)[0, [11, 19]].tolist() == [0.0, 0.0]
    assert chosen(form, logits, 5).tolist() == [[3, 19, 11, 0, 1], [19, 4, 0, 1, 2]]
    assert chosen(form, logits, 5, normalize=True)[0].tolist() == [3, 19, 11, 0, 1]


@st.composite
def few_values(draw: st.DrawFn) -> Tensor:
    """Rows in which most logits have an equal."""
    experts = draw(st.integers(1, 70))
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, 3.5, 200.0, -200.0, INF, -INF, NAN])
    rows = draw(st.lists(st.lists(values, min_size=experts, max_size=experts), max_size=4))
    return torch.tensor(rows).reshape(len(rows), experts)


@pytest.mark.parametrize("name", ["plain", "cpu", "triton"])
@given(logits=few_values(), share=st.floats(0, 1))
@settings(max_examples=25)
def test_any_row_follows_the_rule(name, logits, share):
    top_k = 1 + round(share * (logits.shape[1] - 1))
    assert chosen(name, logits, top_k).tolist() == rule(logits, top_k)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("experts", [16, 33, 64, 131, 256, 577, 1024])
@pytest.mark.parametrize("values", [[-1.0, 0.0, 2.0], [-INF, -INF, NAN, 5.0], [NAN, INF, 0.0], []])
def test_many_experts_follow_the_rule(values, experts):
    """Equals on both sides of a border, rows with fewer numbers than choices, and plain rows.

    The C++ form finds a bound that at least K logits reach and puts only those in order.
    """
    draw = torch.Generator().manual_seed(experts)
    logits = torch.randn(6, experts, generator=draw)
    if values:
        places = torch.randint(len(values), logits.shape, generator=draw)
        logits = torch.tensor(values)[places]
        logits[1, 10:] = values[0]
        logits[2] = values[0]
    for top_k in (1, 7, 8, 16, 17, 32, 33, 64, 65):
        if top_k <= experts:
            best = best_experts(logits, top_k)
            assert best.tolist() == rule(logits, top_k)
            assert torch.equal(dispatch.best_experts(logits, top_k), best)
            assert torch.equal(dispatch.softmax_top_k(logits, top_k)[1], best)


@pytest.mark.parametrize("scoring", ["dot", "cosine", "sips"])
@given(seed=st.integers(0, 10**6), experts=st.integers(2, 40), heads=st.integers(1, 4))
@settings(max_examples=12)
def test_experts_with_the_same_anchors_are_taken_in_the_same_order_everywhere(
    scoring, seed, experts, heads
):
    """Whole routers: what each form chose are the best of the logits that it returned."""
    generator = torch.Generator().manual_seed(seed)
    distinct = torch.randn(3, heads, 2, generator=generator)
    anchors = distinct[torch.randint(3, (experts,), generator=generator)]
    x = torch.randn(4, 6, generator=generator)
    projection = torch.randn(2, 6, generator=generator)
    top_k = min(experts, 5)
    for name in ("plain", "cpu", "triton"):
        there, *parts = (tensor.to(device_of(name)) for tensor in (x, projection, anchors))
        with implementation(name):
            logits, _, indices = dispatch.route(
                there, (parts[0], None, parts[1]), ScoreConstants(scoring), top_k=top_k
            )
        assert indices.tolist() == rule(logits, top_k), name


@pytest.mark.usefixtures("unchecked")
def test_whole_routers_agree_on_ties_that_no_rounding_breaks():
    """Small integers: every sum is exact in every order, so every form sees the same ties."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-2, 3, (40, 8), generator=generator).float()
    projection = torch.randint(-1, 2, (2, 8), generator=generator).float()
    anchors = torch.randint(-1, 2, (37, 1, 2), generator=generator).float()
    found = []
    for name in ("plain", "cpu", "triton"):
        there, *parts = (tensor.to(device_of(name)) for tensor in (x, projection, anchors))
        with implementation(name):
            routed = dispatch.route(there, (parts[0], None, parts[1]), ScoreConstants(), top_k=6)
        found.append(routed[2].tolist())
    assert found[0] == found[1] == found[2] == rule(routed[0], 6)


def test_equal_anchors_give_equal_logits_in_every_lane():
    """The C++ form: the lanes of a vector and the rest after them compute the same bits."""
    generator = torch.Generator().manual_seed(0)
    x, projection = torch.randn(9, 12, generator=generator), torch.randn(2, 12, generator=generator)
    for scoring in ("dot", "cosine", "sips"):
        for scale in (1.0, 60.0):  # with and without a maximum under the exponential
            anchors = (scale * torch.randn(1, 3, 2, generator=generator)).repeat(37, 1, 1)
            with implementation("cpu"):
                logits = dispatch.route_logits(
                    x, (projection, None, anchors), ScoreConstants(scoring)
                )
            assert torch.equal(logits, logits[:, :1].expand_as(logits))


@pytest.mark.parametrize("name", ["plain", "cpu", "triton"])
@pytest.mark.parametrize(
    "selection",
    [
        Selection(gate="sigmoid"),
        Selection(scale=2.0),
        Selection(gate="sigmoid", block_bias=True),
        Selection(block_bias=True),
        Selection(gate="sigmoid", groups=4, kept_groups=2, block_bias=True),
        Selection(groups=4, kept_groups=2, group_best=1),
    ],
    ids=str,
)
def test_other_selections_follow_the_rule(selection, name):
    device = device_of(name)
    logits = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]], device=device)
    bias = torch.zeros(8, device=device)
    kept = [0, 2, 3] if selection.groups == 1 else [0, 2, 3, 1]
    with implementation(name):
        indices = selection(Stub(len(kept)), logits, bias)[1]
        all_nan = selection(Stub(3), torch.full((2, 8), NAN, device=device), bias)[1]
    if selection.group_best == 1:  # four groups of equal best experts: the first two are kept
        assert indices.tolist() == [[0, 2, 3, 1]]
    elif selection.groups == 4:  # groups 1 and 3 are whole, 2 is not
        assert indices.tolist() == [[2, 3, 6, 7]]
    else:
        assert indices.tolist() == [kept]
    assert all_nan.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("worth", [-INF, NAN])
def test_an_expert_of_a_kept_group_stands_before_those_of_dropped_ones(worth):
    selection = Selection(gate="sigmoid", groups=2, kept_groups=1, group_best=1, block_bias=True)
    bias = torch.tensor([1.0, 1.0, 9.0, worth])
    assert selection(Stub(2), torch.zeros(1, 4), bias)[1].tolist() == [[2, 3]]


@pytest.mark.parametrize("top_k", [0, -1, 5])
def test_a_number_of_experts_outside_of_what_there_are_is_refused(top_k):
    with pytest.raises(ValueError, match=f"top_k must be between 1 and 4; got top_k={top_k}"):
        select_experts(torch.ones(2, 4), top_k)
