"""Comparisons of two runs against choices, log-probabilities and divergences by hand."""

import copy

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div
from transformers import OlmoeConfig, OlmoeForCausalLM

from l2r import L2RConfig, record, replay
from l2r.analysis.certificates.attack import exact
from l2r.analysis.certificates.certify import certify, holds_within
from l2r.analysis.routes.mismatch import (
    Comparison,
    RoutingRun,
    _divergence,
    compare_models,
    compare_routes,
)
from l2r.files.mismatch import NO_STATEMENT
from l2r.hf.swap import running_sites
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.swap import replace_routers
from l2r.routers.observe import find_routers, watched
from tests.analysis.diagnostics.models import SIZES, batches, ours, stock
from tests.hf.families import sample_tokens, tiny_model
from tests.tiers import few


def ids(count=3, **options):
    return [batch["input_ids"] for batch in batches(count, **options)]


def moved(model, size=0.3):
    """A copy whose parameters outside of the routers moved by a share of their spread."""
    other = copy.deepcopy(model)
    kept = {p for r in find_routers(other).values() for p in r.parameters()}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter not in kept and parameter.numel() > 64:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(size * parameter.std() * noise)
    return other


def log_probs(logits, tokens):
    return logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


@pytest.mark.parametrize("make", [ours, stock])
def test_experts_and_costs_are_those_of_two_runs_and_a_replay(make):
    model = make()
    other = moved(model)
    (tokens,) = ids(1)
    got = compare_models(model, other, [tokens]).arrays()
    with torch.no_grad(), record(model) as first:
        one = model(tokens).logits
    with torch.no_grad(), record(other) as second:
        two = other(tokens).logits
    with torch.no_grad(), replay(other, first.routes()):
        again = other(tokens).logits
    for name, routes in (("experts", first.routes()), ("other_experts", second.routes())):
        assert (got[name] == routes.experts.swapaxes(0, 1)).all()
    assert (got["experts"] != got["other_experts"]).any()  # else the case shows nothing
    before = log_probs(one, tokens)
    for name, logits in (("own", two), ("replayed", again)):
        values = torch.from_numpy(got[name]).view_as(tokens)
        assert values[:, -1].isnan().all()
        torch.testing.assert_close(values[:, :-1], log_probs(logits, tokens) - before)
        wide = [part.double().log_softmax(-1) for part in (logits, one)]
        kl = kl_div(*wide, log_target=True, reduction="none").sum(-1)
        torch.testing.assert_close(
            torch.from_numpy(got[f"kl_{name}"]).double(), kl.flatten(), atol=1e-9, rtol=1e-3
        )
    assert not np.allclose(got["own"], got["replayed"], equal_nan=True)


@pytest.mark.parametrize("kind", ["linear", "xmoe", "l2r_dot", "l2r_sips"])
def test_a_decision_is_certified_where_its_radius_exceeds_the_change(kind):
    model = ours(kind)
    other = moved(model, 0.01)
    comparison = compare_models(model, other, ids())
    got = comparison.arrays()
    assert comparison.remarks == ["", ""]
    changed = (np.sort(got["experts"]) != np.sort(got["other_experts"])).any(-1)
    held = got["certified"] == 1
    assert held.any() and not held.all() and changed.any()
    assert not (held & changed).any()


def test_what_the_routers_own_rounding_can_change_is_not_certified():
    """Inputs that do not move, so near a boundary that float32 sums may fall on either side."""
    model = ours("linear")
    comparison = Comparison(model, copy.deepcopy(model))
    weight = next(iter(find_routers(model).values())).weight.detach().double()
    x = torch.randn(50, weight.shape[1], dtype=torch.float64)
    best = (x @ weight.T).topk(3)
    normal = weight[best.indices[:, 1]] - weight[best.indices[:, 2]]  # 2 of the experts are chosen
    unit = normal / normal.norm(dim=1, keepdim=True)
    size = x.norm(dim=1)
    eps, width = torch.finfo(torch.float32).eps, x.shape[1]
    held = {}
    for times in (0.25, 16.0):  # of the allowance
        radius = times * width * eps * size
        near = x - ((x * unit).sum(1) - radius)[:, None] * unit
        kept = (near @ weight.T).topk(3).indices.eq(best.indices).all(1)  # the same boundary
        near = near[kept].float()
        reading = RoutingRun(None, [near, near], [], None)
        router = next(iter(find_routers(model).values()))
        proved = certify(exact(router), near.double()).topk > 0
        assert kept.sum() > 5 and proved.float().mean() > 0.5
        held[times] = comparison.changes(reading, reading)[1][0][proved]
    assert not (held[0.25] == 1).any()
    assert (held[16.0] == 1).float().mean() > 0.5


def test_a_certified_decision_stays_where_rows_of_a_router_share_a_large_part():
    """It is in no difference of logits, but in the rounding of each; softmax does not see it."""
    model = stock()
    with torch.no_grad():
        for router in find_routers(model).values():
            router.weight.copy_(0.5 * torch.randn_like(router.weight))
            router.weight.add_(1e4 * torch.randn(1, router.weight.shape[1]))
    other = copy.deepcopy(model)  # the same routers; all else moves in its last bits
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "gate.weight" not in name:
                parameter.mul_(1 + 2e-7)
    comparison = compare_models(model, other, ids(6, rows=24, length=32))
    got = comparison.arrays()
    changed = (np.sort(got["experts"]) != np.sort(got["other_experts"])).any(-1)
    assert comparison.remarks == ["", ""] and changed.sum() > 3
    assert not (changed & (got["certified"] == 1)).any()


def test_routers_in_other_dtypes_get_no_certificate():
    """Equal numbers, which another dtype adds up to other logits."""
    model = stock().bfloat16()
    other = copy.deepcopy(model).float()
    comparison = compare_models(model, other, ids(1))
    assert comparison.remarks == ["the two routers have other parameters"] * 2


@pytest.mark.slow("a search")
@pytest.mark.parametrize(
    ("kind", "options"),
    [("linear", {}), ("l2r_sips", {"rank": 4, "heads": 3}), ("l2r_sips", {"rank": 2, "heads": 3})],
)
def test_holding_within_a_distance_is_having_a_larger_radius(kind, options):
    router = next(iter(find_routers(ours(kind, **options)).values()))
    x = torch.randn(20 if options.get("rank") == 2 else 100, 16)
    radii = certify(router, x).topk
    if options.get("rank") != 2:  # where geometry proves more
        assert holds_within(router, x, radii * 0.999).all()
    assert not holds_within(router, x, radii * 1.001 + 1e-9).any()
    assert holds_within(router, x, radii * 1e-3)[radii > 1e-6].float().mean() > 0.9


def test_routers_with_other_parameters_get_no_certificate():
    model, other = ours(), ours()
    with torch.no_grad():
        next(iter(find_routers(other).values())).projection.weight.mul_(1.5)
    comparison = compare_models(model, other, ids(1))
    assert comparison.remarks == ["the two routers have other parameters", ""]
    assert (comparison.arrays()["certified"][0] == NO_STATEMENT).all()


# A token has no single route where layers run in a loop.
ROUTED = [name for name in FAMILIES if name != "inkling2_loop_text"]
SWAPS = ("olmoe", "mixtral", "deepseek_v3", "gpt_oss", "afmoe", "lfm2_moe")


@pytest.mark.parametrize("name", few(ROUTED, SWAPS, "every family"))
def test_what_a_swap_changed_is_what_two_runs_say(name):
    """Experts, logits and divergences of both sides; a certificate of one router says nothing."""
    model, tokens = tiny_model(FAMILIES[name]), sample_tokens(3)
    other = replace_routers(copy.deepcopy(model), L2RConfig(rank=4, heads=2))
    comparison = compare_models(model, other, [tokens])
    got = comparison.arrays()
    chosen, logits = zip(*(read(each, tokens) for each in (model, other)), strict=True)
    for side, experts in zip(("experts", "other_experts"), chosen, strict=True):
        assert (np.sort(got[side]) == np.sort(experts)).all()
    change = log_probs(logits[1], tokens) - log_probs(logits[0], tokens)
    values = torch.from_numpy(got["own"]).view_as(tokens)[:, :-1]
    torch.testing.assert_close(values, change, atol=2e-6, rtol=1e-4)
    wide = [part.double().log_softmax(-1) for part in reversed(logits)]
    kl = kl_div(*wide, log_target=True, reduction="none").sum(-1).flatten()
    torch.testing.assert_close(torch.from_numpy(got["kl_own"]).double(), kl, atol=1e-9, rtol=1e-3)
    assert (got["experts"] != got["other_experts"]).any()
    assert (got["certified"] == NO_STATEMENT).all()
    swapped = [each for each in comparison.remarks if "ids of tokens" not in each]  # or left alone
    assert swapped and all("these are" in each and "L2RRouter" in each for each in swapped)


def read(model, tokens):
    """Experts [L, T, K] and logits, by a hook on the routers of the model."""
    found = []

    def keep(x, output, path):
        found.append(output.indices.numpy().reshape(tokens.numel(), -1))

    routers = {site.path: site.router for site in running_sites(model)}
    with torch.no_grad(), watched(routers, keep):
        logits = model(input_ids=tokens, use_cache=False).logits.float()
    return np.stack(found), logits


def test_layers_that_a_swap_left_alone_keep_their_certificates():
    model = stock()
    other = replace_routers(copy.deepcopy(model), L2RConfig(rank=4, heads=2), layers=[1])
    comparison = compare_models(model, other, ids())
    got = comparison.arrays()
    assert comparison.remarks[0] == "" and "these are" in comparison.remarks[1]
    assert (got["certified"][0] == 1).all()  # nothing before it differs
    assert (got["certified"][1] == NO_STATEMENT).all()


def test_a_model_differs_in_nothing_from_itself_in_the_same_arithmetic():
    model = stock()
    got = compare_models(model, copy.deepcopy(model), ids()).arrays()
    assert (got["experts"] == got["other_experts"]).all() and (got["moved"] == 0).all()
    assert np.nanmax(np.abs(got["own"])) == np.nanmax(np.abs(got["replayed"])) == 0


def test_routes_of_another_arithmetic_cost_what_replaying_them_changes():
    model = ours()
    (tokens,) = ids(1)
    other = moved(model)
    with torch.no_grad(), record(other) as recorder:
        theirs = other(tokens).logits
    routes = recorder.routes()
    given = torch.cat([log_probs(theirs, tokens), torch.full((len(tokens), 1), torch.nan)], 1)
    got = compare_routes(model, routes, list(tokens), list(given)).arrays()
    alone = compare_routes(model, routes, list(tokens)).arrays()
    with torch.no_grad():
        own = log_probs(model(tokens).logits, tokens)
        with replay(model, routes):
            same = log_probs(model(tokens).logits, tokens)
    shape = (len(tokens), -1)
    theirs = log_probs(theirs, tokens)
    for array, expected in (
        (got["own"], theirs - own),
        (got["replayed"], theirs - same),
        (alone["own"], same - own),
    ):
        values = torch.from_numpy(array).view(shape)[:, :-1]
        torch.testing.assert_close(values, expected, atol=2e-6, rtol=1e-4)
    assert np.isnan(alone["replayed"]).all()


def test_routes_of_other_tokens_are_refused():
    model = ours()
    with torch.no_grad(), record(model) as recorder:
        model(ids(1)[0])
    routes = recorder.routes()
    with pytest.raises(ValueError, match="they have 4 sequences and there are 2 rows"):
        compare_routes(model, routes, list(ids(1)[0][:2]))
    with pytest.raises(ValueError, match=r"their sequences have \[10\] tokens and the rows \[9\]"):
        compare_routes(model, routes, list(ids(1)[0][:, :9]))
    with pytest.raises(ValueError, match="at least one row; got none"):
        compare_models(model, model, []).arrays()


def test_models_of_other_tokens_are_refused():
    """One has half of the embeddings, so that many tokens are not in it."""
    torch.manual_seed(0)
    vocabulary = SIZES["vocab_size"]
    sizes = [{**SIZES, "vocab_size": size} for size in (vocabulary, vocabulary // 2)]
    one, other = (OlmoeForCausalLM(OlmoeConfig(**fields)) for fields in sizes)
    tokens = [torch.full((1, 4), vocabulary - 1)]
    for pair in ((one, other), (other, one)):
        with pytest.raises(ValueError, match="both models must have the same tokens"):
            compare_models(*pair, tokens)
    with pytest.raises(ValueError, match=f"sequence 0 has {vocabulary - 1} to {vocabulary - 1}"):
        compare_models(other, other, tokens)


def test_words_without_a_probability_add_nothing_to_a_divergence():
    """Logits of padded vocabularies are -inf: the divergence is that of the other words."""
    draw = torch.Generator().manual_seed(0)
    one, other = (torch.randn(2, 3, 8, generator=draw) for _ in range(2))
    words = torch.tensor([True] * 6 + [False] * 2)
    masked = [logits.masked_fill(~words, -torch.inf) for logits in (one, other)]
    wide = [logits[..., words].double().log_softmax(-1) for logits in (other, one)]
    expected = kl_div(*wide, log_target=True, reduction="none").sum(-1).flatten()
    torch.testing.assert_close(_divergence(*masked).double(), expected, atol=1e-7, rtol=1e-6)
    assert _divergence(one, masked[1]).isposinf().all()
