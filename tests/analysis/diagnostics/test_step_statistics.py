"""Statistics of the routers during a step, against numbers counted by hand."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from l2r import L2RConfig, build_router, capture
from l2r.analysis.diagnostics.step_statistics import NUMBERS, RouterWatch, router_statistics
from l2r.functional import load_balancing_loss, router_z_loss
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import router_sites
from l2r.hf.swap.sites import running_sites as router_sites_and_others
from l2r.hf.swap.swap import replace_routers
from tests.analysis.diagnostics.models import ours
from tests.hf.families import FAULTS, LOOPED, each_rule, sample_tokens, tiny_model

NAMES = ("olmoe", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


def by_hand(logits, indices):
    load = torch.bincount(indices.flatten(), minlength=logits.shape[1]).double()
    share = load / load.sum()
    top = logits.double().topk(2).values
    return {
        "load_entropy": float(torch.special.entr(share).sum()) / math.log(len(load)),
        "max_over_mean": float(load.max() / load.mean()),
        "dead_experts": float((load == 0).sum()),
        "mean_margin": float((top[:, 0] - top[:, 1]).mean()),
        "z_loss": float(router_z_loss(logits)),
        "balance_loss": float(load_balancing_loss(logits, indices)),
    }


def watched(model, *batches):
    """Statistics of forward passes on batches."""
    watch = RouterWatch(model)
    watch.start()
    for batch in batches:
        model(**batch)
    return watch.read()


def recorded(model, **inputs):
    """What every router returned, by an independent hook."""
    found = {}
    hooks = [
        site.router.register_forward_hook(lambda m, a, out, n=site.layer: found.update({n: out}))
        for site in router_sites(model)
    ]
    model(**inputs)
    for hook in hooks:
        hook.remove()
    return found


def model_of(kind):
    how, _, name = kind.partition(" ")
    model = ours() if how == "own" else tiny_model(FAMILIES[name])
    return replace_routers(model, L2RConfig(rank=2, heads=4)) if how == "swapped" else model


KINDS = ["own", *(f"{how} {name}" for name in NAMES for how in ("stock", "swapped"))]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_numbers_of_every_layer_are_those_counted_by_hand(kind):
    model = model_of(kind)
    ids = sample_tokens(3)
    found, routed = watched(model, {"input_ids": ids}), recorded(model, input_ids=ids)
    assert found.layers == tuple(routed)
    for position, (logits, _, indices) in enumerate(routed.values()):
        expected = by_hand(logits, indices)
        assert set(expected) == set(NUMBERS)
        for name, value in expected.items():
            assert getattr(found, name)[position] == pytest.approx(value, rel=1e-5)
    assert router_statistics(list(routed.values())).scalars() == pytest.approx(
        {
            name.replace("/layer-1", "/layer-0") if len(routed) == 1 else name: value
            for name, value in found.scalars().items()
        }
    )


@torch.no_grad()
def test_capture_and_router_logits_give_the_same():
    model, ids = ours(), sample_tokens()
    with capture(model) as captured:
        output = model(ids, output_router_logits=True)
    first = router_statistics(captured).scalars()
    assert first == router_statistics(output, model=model).scalars()
    assert first == watched(model, {"input_ids": ids}).scalars()
    assert len(first) == 3 * len(NUMBERS)
    assert first["router/z_loss"] == pytest.approx(
        float(router_z_loss(captured.logits())), rel=1e-5
    )


@pytest.mark.parametrize("name", each_rule(FAMILIES))
@torch.no_grad()
def test_statistics_of_every_family_are_of_the_tokens_that_a_step_trains_on(name):
    """By capture, by a watch, and of a model's output, against counts of what experts get."""
    model, ids = tiny_model(FAMILIES[name]), sample_tokens(3)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[1, 5:] = 0
    labels[0, :4] = -100
    call = {"input_ids": ids, "attention_mask": mask, "labels": labels, "use_cache": False}
    if not model.can_generate():
        call["labels"] = (labels > 0).long().masked_fill(labels < 0, -100)
    keep = (mask.bool() & (labels != -100)).flatten()
    expected = {}
    with capture(model) as captured:
        output = model(**call, output_router_logits=True)
    for path, calls in captured.outputs.items():
        chosen = torch.cat([one.indices[keep] for one in calls]).flatten()
        expected[path] = torch.bincount(chosen, minlength=calls[0].logits.shape[1])
    watch = watched(model, call)
    for found in (router_statistics(captured), watch):
        assert found.layers == tuple(captured.layers.values())
        for load, wanted in zip(found.load, expected.values(), strict=True):
            assert torch.equal(load.long(), wanted)
    parts = [{key: value[at] for key, value in call.items() if key != "use_cache"}
             for at in (slice(0, 1), slice(1, 3))]  # fmt: skip
    if name not in FAULTS and name not in LOOPED:
        both = watched(model, *parts)
        assert both.scalars() == pytest.approx(watch.scalars(), rel=1e-3)
    logits = [layer for layer in getattr(output, "router_logits", None) or () if layer is not None]
    by_token = any(site.by_token for site in router_sites_and_others(model))
    if len(logits) == len(expected) and not by_token:
        stated = router_statistics(output, mask=keep, model=model)
        assert stated.layers == watch.layers
        assert stated.scalars() == pytest.approx(watch.scalars(), rel=1e-5)


def test_packed_documents_count_without_their_borders_labels():
    """Two documents in a row: the first token of each has no label, as collators pack them."""
    model, ids = tiny_model(FAMILIES["qwen3_moe"]), sample_tokens(1)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    labels = ids.masked_fill(positions == 0, -100)
    found = watched(model, {"input_ids": ids, "position_ids": positions, "labels": labels})
    assert all(load.sum() == 2 * 10 for load in found.load)


def test_calls_without_gradients_do_not_count_in_training():
    model, ids = tiny_model(FAMILIES["mixtral"]).train(), sample_tokens()
    watch = RouterWatch(model)
    watch.start()
    model.generate(ids, max_new_tokens=4, do_sample=True)
    model(ids)
    assert all(load.sum() == 2 * ids.numel() for load in watch.read().load)
    watch.start()
    model(ids, labels=torch.full_like(ids, -100))
    assert watch.read() is None  # nothing is trained on


@torch.no_grad()
def test_padding_does_not_count_and_micro_batches_add_up():
    model = tiny_model(FAMILIES["mixtral"])
    ids = sample_tokens()
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    parts = [{"input_ids": ids[:1]}, {"input_ids": ids[1:, :5]}]
    whole = watched(model, {"input_ids": ids, "attention_mask": mask})
    assert whole.load[0].sum() == 2 * mask.sum()
    assert whole.scalars() == pytest.approx(watched(model, *parts).scalars(), rel=1e-5)
    assert whole.scalars() == pytest.approx(
        router_statistics(
            list(recorded(model, input_ids=ids, attention_mask=mask).values()), mask=mask
        ).scalars(),
        rel=1e-5,
    )


def test_a_recomputed_layer_counts_once_and_nothing_is_left_behind():
    model = ours()
    ids, watch = sample_tokens(), RouterWatch(model)
    watch.start()
    assert watch.is_open
    out = checkpoint(lambda x: model(x).logits.sum(), ids, use_reentrant=False)
    out.backward()
    assert watch.read().load[0].sum() == 2 * ids.numel()
    assert not watch.is_open and watch.read() is None
    hooks = [m._forward_hooks or m._forward_pre_hooks for m in model.modules()]
    assert not any(hooks)


@torch.no_grad()
def test_two_routers_of_one_block_are_two_layers():
    """Neither is lost, nor are their sums added, which would fail for other numbers of experts."""
    sizes = {"hidden_size": 8, "top_k": 2}
    both = torch.nn.ModuleDict(
        {
            "first": build_router("linear", num_experts=4, **sizes),
            "second": build_router("linear", num_experts=6, **sizes),
        }
    )
    model = torch.nn.ModuleList([both])
    x, watch = torch.randn(5, 8), RouterWatch(model)
    watch.start()
    with capture(model) as captured:
        outputs = [router(x) for router in both.values()]
    wanted = router_statistics([(o.logits, o.weights, o.indices) for o in outputs])
    for found in (router_statistics(captured), watch.read()):
        assert [len(load) for load in found.load] == [4, 6]
        assert found.scalars() == pytest.approx(wanted.scalars())


def test_the_picture_shows_dead_fair_and_full_experts():
    """Experts 0 to 3 get 0, 4, 6 and 10 of 20 assignments: none, less than fair, more, twice."""
    indices = torch.tensor([[3, 1]] * 4 + [[3, 2]] * 6)
    picture = router_statistics([(torch.randn(10, 4), torch.ones(10, 2), indices)]).picture()
    assert picture.shape == (3, 8, 32) and picture.dtype == torch.uint8
    cells = picture[:, 4, 4::8].T.tolist()
    assert cells[0] == [0, 0, 0] and cells[3] == [178, 24, 43]
    assert cells[1][2] > cells[1][0] and cells[2][0] > cells[2][2]  # blue below, red above


def test_sources_without_routed_tokens_are_refused():
    with pytest.raises(ValueError, match="pass the model too"):
        router_statistics(ours()(sample_tokens(), output_router_logits=True))
    mixed = tiny_model(FAMILIES["phimoe"])
    output = mixed.train()(sample_tokens(), output_router_logits=True)
    with pytest.raises(ValueError, match=r"do not tell the experts.*use l2r\.capture"):
        router_statistics(output, model=mixed)
    for nothing in ([], None, ours()(sample_tokens())):
        with pytest.raises(ValueError, match="source must be what capture recorded"):
            router_statistics(nothing)
    with capture(ours()) as captured:
        pass
    with pytest.raises(ValueError, match="it has no layer"):
        router_statistics(captured)


@pytest.mark.parametrize("kind", ["own", "stock mixtral", "swapped deepseek_v3"])
@torch.no_grad()
def test_a_loop_that_calls_the_model_inside_counts_no_padding(kind):
    """As those do that compute logits of the answers alone."""
    model, ids = model_of(kind), sample_tokens(3)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    found = []
    for called in (model, model.base_model):
        with capture(model) as captured:
            called(input_ids=ids, attention_mask=mask, use_cache=False)
        assert [call.rows for call in captured.model_calls()] == [3]
        found.append(router_statistics(captured).scalars())
    assert (
        found[0] == found[1] == watched(model, {"input_ids": ids, "attention_mask": mask}).scalars()
    )
    assert found[0] != router_statistics(captured, mask=torch.ones_like(ids)).scalars()
