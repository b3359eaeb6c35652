"""A step beside its sampler, against loops over rows and documents."""

import copy
import math

import pytest
import torch

from l2r import capture, record
from l2r.analysis.diagnostics import router_statistics
from l2r.analysis.routes import route_gap
from l2r.hf.routes import Routes
from l2r.hf.swap.families import FAMILIES
from l2r.routers.observe import find_routers
from tests.analysis.diagnostics.models import ours
from tests.hf.families import tiny_model

PROMPTS, ANSWERS, WIDTH, NEW = (4, 6, 2), (5, 3, 4), 6, 5  # tokens of each row


def model_of(kind):
    return ours() if kind == "own" else tiny_model(FAMILIES[kind])


def sampler_of(model):
    """The model with other routers, as after a step, so that many choices differ."""
    sampler = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for router in find_routers(sampler).values():
            for parameter in router.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * parameter.std().nan_to_num(0.0) * 0.3)
    return sampler


def sampled(model):
    """Tokens of a sampler, its routes and log-probabilities, row by row without padding.

    The last token of a row is not forwarded.
    """
    sampler = sampler_of(model)
    generator = torch.Generator().manual_seed(0)
    rows, routes, logs = [], [], []
    for prompt, new in zip(PROMPTS, ANSWERS, strict=True):
        row = torch.randint(3, 60, (1, prompt + new), generator=generator)
        with torch.no_grad(), record(sampler) as recorder:
            logits = sampler(row[:, :-1], use_cache=False).logits.float()
        steps = logits.log_softmax(-1).gather(-1, row[:, 1:, None])[0, :, 0]
        rows.append(row[0])
        logs.append(torch.cat([torch.tensor([math.nan]), steps]))
        routes.append(recorder.routes())
    return rows, Routes.concatenate(routes).extended(1), logs


def padded(rows):
    """The rows as RL pads them, prompts to the left and answers to the right, and the masks."""
    ids = torch.zeros(len(rows), WIDTH + NEW, dtype=torch.int64)
    mask, answers = ids.clone(), ids.clone()
    for number, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        start = WIDTH - prompt
        ids[number, start : start + len(row)] = row
        mask[number, start : start + len(row)] = 1
        answers[number, WIDTH : start + len(row)] = 1
    return ids, mask, answers


def next_log_probs(logits, ids):
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def by_hand(model, rows, routes, logs, prompts=PROMPTS):
    """Numbers of rows that are run one by one, token by token."""
    layers, tokens, changed, somewhere, kept, unknown = 0, 0, {}, 0, {}, 0
    gaps = {"all": [], True: [], False: []}
    for row, route, log, prompt in zip(rows, routes, logs, prompts, strict=True):
        with torch.no_grad(), record(model) as recorder:
            logits = model(row[None], use_cache=False).logits[0]
        own = recorder.routes()
        layers = own.layers
        other = {int(p): e for p, e in zip(route.positions, route.experts, strict=True)}
        sets = {
            token: [set(a) & set(b) for a, b in zip(own.experts[token], other[token], strict=True)]
            for token in other
        }
        k = own.experts.shape[-1]
        moved = {token: any(len(both) < k for both in sets[token]) for token in sets}
        for token in range(prompt, len(row)):
            now = float(logits[token - 1].double().log_softmax(-1)[row[token]])
            difference = now - float(log[token])
            gaps["all"].append(difference)
            gaps[moved[token - 1]].append(abs(difference))
            if token not in other:
                unknown += 1
                continue
            tokens += 1
            somewhere += moved[token]
            for layer, both in zip(layers, sets[token], strict=True):
                changed[layer] = changed.get(layer, 0) + (len(both) < k)
                kept[layer] = kept.get(layer, 0) + len(both) / k
    mean = lambda values: sum(values) / len(values) if values else math.nan  # noqa: E731
    return {
        "layers": layers, "tokens": tokens, "unknown": unknown,
        "changed": tuple(changed[n] / tokens for n in layers),
        "changed_in_some_layer": somewhere / tokens,
        "kept": tuple(kept[n] / tokens for n in layers),
        "log_prob_gap": mean([abs(g) for g in gaps["all"]]),
        "largest_log_prob_gap": max(abs(g) for g in gaps["all"]),
        "gap_where_changed": mean(gaps[True]), "gap_where_kept": mean(gaps[False]),
        "kl": mean([math.exp(g) - 1 - g for g in gaps["all"]]),
    }  # fmt: skip


def assert_equal(gap, expected):
    """float32 log-probabilities of rows with padding, which is another order of sums."""
    for name, value in expected.items():
        found = getattr(gap, name)
        assert found == pytest.approx(value, rel=1e-4, abs=2e-6, nan_ok=True), name


@pytest.mark.parametrize("kind", ["own", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_padded_step_is_the_sum_over_its_rows(kind):
    model = model_of(kind)
    rows, routes, logs = sampled(model)
    ids, mask, answers = padded(rows)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    then = torch.full(ids.shape, math.nan)
    then[mask.bool()] = torch.cat(logs)
    with capture(model) as captured:
        logits = model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
    now = next_log_probs(logits, ids)
    expected = by_hand(model, rows, routes, logs)
    assert expected["unknown"] == 3 and expected["tokens"] == 9
    assert 0 < expected["changed_in_some_layer"] < 1
    assert expected["gap_where_changed"] > 0 and expected["gap_where_kept"] > 0
    whole = route_gap(captured, routes, mask=answers, log_probs=now, sampled_log_probs=then)
    assert_equal(whole, expected)
    last = {"log_probs": now[:, -NEW:], "sampled_log_probs": then[:, -NEW:]}
    assert route_gap(captured, routes, mask=answers[:, -NEW:], **last) == whole
    scalars = whole.scalars()
    assert scalars["routes/changed/layer-1"] == whole.changed[whole.layers.index(1)]
    assert not any(map(math.isnan, scalars.values()))


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens_q"])
def test_a_packed_step_is_the_sum_over_its_documents(by):
    model = model_of("own")
    rows, routes, logs = sampled(model)
    ids = torch.cat(rows)[None]
    lengths = torch.tensor([len(row) for row in rows])
    places = torch.cat([torch.arange(len(row)) for row in rows])[None]
    borders = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    given = {"position_ids": places} if by == "position_ids" else {"cu_seq_lens_q": borders}
    answers = torch.cat([torch.arange(len(r)) >= p for r, p in zip(rows, PROMPTS, strict=True)])
    # what a row alone gives: kernels that know documents keep them apart, the CPU's may not
    alone = [next_log_probs(model(row[None], use_cache=False).logits, row[None])[0] for row in rows]
    now = torch.cat([torch.cat([torch.tensor([math.nan]), part]) for part in alone]).detach()
    with capture(model) as captured:
        model(ids, use_cache=False, **given)
    expected = by_hand(model, rows, routes, logs)
    gap = route_gap(
        captured, routes, mask=answers, log_probs=now, sampled_log_probs=torch.cat(logs)
    )
    if by == "position_ids":
        assert_equal(gap, expected)
    else:  # the CPU's attention reads across borders: the experts are others, the tokens are not
        for name in ("tokens", "unknown", "log_prob_gap", "kl"):
            assert getattr(gap, name) == pytest.approx(expected[name], rel=1e-4, abs=2e-6)


def test_micro_batches_of_shuffled_rows_and_labels():
    model = model_of("own")
    rows, routes, logs = sampled(model)
    ids, mask, answers = padded(rows)
    order = [2, 0, 1]
    labels = ids.masked_fill(answers == 0, -100)
    with capture(model) as captured:
        for part in (order[:1], order[1:]):
            model(ids[part], attention_mask=mask[part], labels=labels[part], use_cache=False)
    picked = [[values[n] for n in order] for values in (rows, list(routes), logs, PROMPTS)]
    expected = by_hand(model, *picked)
    gap = route_gap(captured, routes[order])
    assert_equal(gap, {n: expected[n] for n in ("tokens", "changed", "kept", "layers", "unknown")})
    assert math.isnan(gap.kl) and "routes/kl" not in gap.scalars()
    masks = [answers[order[:1]], answers[order[1:]]]
    assert route_gap(captured, routes[order], mask=masks) == gap
    numbers = router_statistics(captured).scalars()
    for given in (masks, [part[:, -NEW:] for part in masks]):
        assert router_statistics(captured, mask=given).scalars() == numbers
    with pytest.raises(ValueError, match="mask must be a tensor for each of the 2 calls"):
        router_statistics(captured, mask=answers)


def test_the_same_weights_in_the_same_arithmetic_differ_in_nothing():
    model = model_of("qwen3_moe")
    ids = torch.randint(3, 60, (2, 7))
    with torch.no_grad(), record(model) as recorder, capture(model) as captured:
        logits = model(ids, use_cache=False).logits
    now = next_log_probs(logits, ids)
    gap = route_gap(captured, recorder.routes(), log_probs=now, sampled_log_probs=now)
    assert gap.tokens == 14 and gap.changed_in_some_layer == 0 and set(gap.kept) == {1.0}
    assert gap.log_prob_gap == gap.largest_log_prob_gap == gap.kl == 0
    assert math.isnan(gap.gap_where_changed)


def test_what_does_not_fit_is_refused_in_one_line():
    model, other = model_of("qwen3_moe"), model_of("own")
    ids = torch.randint(3, 60, (2, 7))
    with torch.no_grad(), record(model) as recorder, capture(model) as captured:
        model(ids, use_cache=False)
    routes = recorder.routes()
    with torch.no_grad(), capture(other) as others:
        other(ids, use_cache=False)
    short = {"log_probs": torch.zeros(2, 6)}
    for given, options, words in (
        (routes.truncated(6), {}, r"routes.extended\(1\) adds the last token"),
        (routes[[0]], {}, r"their lengths are \[7\] and those of the step \[7, 7\]"),
        (routes, short, "must be given together; got no sampled_log_probs"),
        (routes, {"mask": torch.ones(2, 9)}, r"mask must have a number for each of the 14 tokens"),
        (routes, {"mask": torch.ones(3, 2)}, r"\[2, columns\] for the last columns"),
        (routes, {"mask": [ids, ids]}, "mask must be a tensor for each of the 1 calls"),
    ):
        with pytest.raises(ValueError, match=words):
            route_gap(captured, given, **options)
    with pytest.raises(ValueError, match="routes and model must have the same"):
        route_gap(others, routes)
