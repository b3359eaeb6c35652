"""Features of docs/your-loop.md in the tools' loops: each against the same step by hand.

A cell is one optimizer step of two micro-batches with padding, activation checkpointing and
bfloat16. Its calls are run again by ``Reference``, which has no feature and no tool.
"""

import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import l2r
from l2r.errors import InputError
from l2r.hf.swap.sites import running_sites, selection_biases
from scripts.others.tools.loops import TOOLS
from scripts.others.tools.own_loop import (
    BALANCE,
    MICRO_BATCHES,
    SCOPES,
    SPEED,
    RefusedError,
    autocast,
    opened,
)
from scripts.others.tools.rows import Result, error_of
from scripts.others.tools.subjects import LOOP_FAMILIES, Subject
from scripts.others.tools.watching import Reference, Seen

# Of a norm: half of bfloat16's step at 1, as a rounding that fell otherwise leaves.
ROOM = 2**-9
Check = Callable[[str, Subject], str]


@cache
def _step(tool: str, subject: Subject, feature: str) -> list[Seen]:
    """One step by a tool."""
    return TOOLS[tool](subject, feature)


def _reference(tool: str, subject: Subject, ranks: Sequence[Seen], **more: Any) -> Reference:
    start = opened(subject)
    assert all(len(seen.calls) == len(seen.seeds) == MICRO_BATCHES for seen in ranks), "calls"
    if not tool.startswith("FSDP2"):
        return Reference(start, ranks, autocast, **more)
    routers = {id(p) for site in running_sites(start) for p in site.router.parameters()}
    for parameter in start.parameters():
        if id(parameter) not in routers:
            parameter.data = parameter.data.bfloat16()
    return Reference(_wide_routers(start), ranks, nullcontext, **more)


def _wide_routers(model: Any) -> Any:
    """Routers that compute in float32 in a model of bfloat16, as shard_routers has them.

    Their weights have the dtype that the family's have in bfloat16.
    """
    for site in running_sites(model):
        token = torch.ones(1, site.sizes["hidden_size"], dtype=torch.bfloat16)
        dtype = copy.deepcopy(site.router).bfloat16()(token)[1].dtype
        site.router.register_forward_pre_hook(
            lambda _, args: tuple(a.float() if a.is_floating_point() else a for a in args)
        )
        site.router.register_forward_hook(
            lambda _, args, out, dtype=dtype: (out[0], out[1].to(dtype), out[2])
        )
    return model


def _room(tool: str) -> float:
    """Of a gradient's norm: two steps of bfloat16, one more where the reference adds in it."""
    return (8 if tool.startswith("FSDP2") else 4) * ROOM


def _near(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], room: float) -> None:
    """Differences are within ``room`` of each norm; of 1% of all where parts cancel to less."""
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    sizes = {name: float(value.double().norm()) for name, value in expected.items()}
    least = 0.01 * sum(size**2 for size in sizes.values()) ** 0.5
    for name, value in expected.items():
        wrong = float((got[name].double() - value.double()).norm()) / max(sizes[name], least)
        assert wrong <= room, f"{name}: {wrong:.1e} of its norm"


def _same_routing(captured: Any, expected: Any) -> None:
    """Logits and weights to a bfloat16 rounding, experts equal."""
    for found, wanted in zip(captured, expected, strict=True):
        assert found.keys() == wanted.keys()
        for path, (logits, weights, experts) in found.items():
            assert torch.equal(experts, wanted[path][2]), f"experts of {path}"
            _near({"logits": logits}, {"logits": wanted[path][0].detach()}, ROOM)
            _near({"weights": weights}, {"weights": wanted[path][1].detach()}, ROOM)


def captures(tool: str, subject: Subject) -> str:
    """What capture gave is what routers give, and experts are those that the blocks used."""
    ranks = _step(tool, subject, "capture")
    reference = _reference(tool, subject, ranks)
    for seen, routing in zip(ranks, reference.routing, strict=True):
        _same_routing(seen.found["captured"], routing)
        used = [experts for calls in seen.forward.values() for experts in calls]
        chosen = [call[path][2] for path in routing[0] for call in seen.found["captured"]]
        assert all(torch.equal(a, b) for a, b in zip(used, chosen, strict=True)), "experts used"
    _near(ranks[0].gradients, reference.gradients(), _room(tool))
    return ""


def replays(tool: str, subject: Subject) -> str:
    """Routes recorded in training are those captured; another model's are taken, and trained by."""
    first = _step(tool, subject, "record and replay")
    for seen in first:
        for at, routes in enumerate(seen.found["routes"]):
            real = seen.calls[at]["attention_mask"].flatten().bool()
            captured = torch.stack([e[real] for _, _, e in seen.found["captured"][at].values()], 1)
            assert torch.equal(torch.as_tensor(routes.experts).long(), captured), "recorded"
    routes, chosen = zip(*(_of_another(subject, seen.calls) for seen in first), strict=True)
    second = TOOLS[tool](subject, "record and replay", routes)
    reference = _reference(tool, subject, second, chosen=chosen)
    differ = 0
    for one, two, expected in zip(first, second, reference.routing, strict=True):
        for a, b in zip(one.calls, two.calls, strict=True):
            assert torch.equal(a["input_ids"], b["input_ids"]), "other batches"
        _same_routing(two.found["captured"], expected)
        pairs = zip(one.found["captured"], two.found["captured"], strict=True)
        differ += sum(int((a[path][2] != b[path][2]).sum()) for a, b in pairs for path in a)
    assert differ > 0, "the routes of another are the model's own"
    _near(second[0].gradients, reference.gradients(), _room(tool))
    return ""


def _of_another(subject: Subject, calls: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Routes of a model with other routers, and their experts by router, -1 for padding."""
    model = opened(subject).eval()
    generator = torch.Generator().manual_seed(11)
    routes, chosen = [], []
    sites = running_sites(model)
    with torch.no_grad():
        for site in sites:
            for weight in site.router.parameters():
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
        for call in calls:
            mask = call["attention_mask"]
            with l2r.record(model) as recorder:
                model(input_ids=call["input_ids"], attention_mask=mask, use_cache=False)
            routes.append(recorder.routes())
            experts = torch.as_tensor(routes[-1].experts).long()
            full = torch.full((mask.numel(), *experts.shape[1:]), -1)
            full[mask.flatten().bool()] = experts
            chosen.append({site.path: full[:, at] for at, site in enumerate(sites)})
    return routes, chosen


def losses(feature: str, tool: str, subject: Subject) -> str:
    """The step's gradient is the tool's own plus that of the loss in float64, and its value."""
    try:
        ranks = _step(tool, subject, feature)
    except InputError as error:
        if "must see the micro-batches before the step" not in str(error):
            raise
        raise RefusedError("with accumulation: micro-batches are made in the step") from error
    reference = _reference(tool, subject, ranks)
    balance = reference.balance(SCOPES[feature])
    expected, without = reference.gradients(BALANCE * balance), reference.gradients()
    for seen in ranks:
        _near(seen.gradients, expected, _room(tool))
    routers = [name for name in expected if "gate.weight" in name or "router.weight" in name]
    for name in routers:  # a loss that is off would show
        part = (expected[name] - without[name]).norm() / expected[name].norm()
        assert part > 16 * ROOM, f"{name}: the loss is {float(part):.1e} of the gradient"
    values = [value for seen in ranks for value in seen.found["balance"]]
    value = sum(values) / len(values)
    assert abs(value - float(balance)) < ROOM * float(balance), (value, float(balance))
    return ""


def balances(tool: str, subject: Subject) -> str:
    """Biases after the step are those before, moved by the loads of all calls."""
    if not selection_biases(subject.model()):
        try:
            TOOLS[tool](subject, "bias_balancing")
        except Exception as error:
            assert "has no selection bias to move" in str(error), error
            raise RefusedError("the family has no selection bias; refused in one line") from error
        raise AssertionError("a family without a bias was not refused")
    ranks = _step(tool, subject, "bias_balancing")
    expected = _reference(tool, subject, ranks).moved(SPEED)
    start = selection_biases(opened(subject))
    for seen in ranks:
        for path, bias in expected.items():
            assert (bias - start[path]).abs().max() > SPEED / 2
            torch.testing.assert_close(seen.biases[path], bias, rtol=0, atol=1e-6)
    return ""


def pins(tool: str, subject: Subject) -> str:
    """With noise before routers, recomputed layers take the experts of their forward.

    Without pins they do not.
    """
    for seen in _step(tool, subject, "pin_routes"):
        assert seen.forward and seen.forward.keys() == seen.again.keys(), "nothing was recomputed"
        for name, experts in seen.forward.items():
            assert len(experts) == MICRO_BATCHES
            pairs = zip(experts, seen.again[name], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), f"experts of {name}"
    try:
        control = TOOLS[tool](subject, "no pin_routes")
    except Exception as error:  # torch's, of tensors that have other shapes than in the forward
        assert "heckpoint" in str(error) or "recomput" in str(error), error
        return ""
    flips = [
        not torch.equal(a, b)
        for seen in control
        for name in seen.forward
        for a, b in zip(seen.forward[name], seen.again[name], strict=True)
    ]
    assert any(flips), "no expert differs without pins either"
    return ""


def statistics(tool: str, subject: Subject) -> str:
    """Numbers of the log are those of the trained tokens in float64."""
    ranks = _step(tool, subject, "router_statistics")
    last = ranks[0].found.get("last", False)
    expected = _reference(tool, subject, ranks).statistics(last=last)
    for seen in ranks:
        for name, value in expected.items():
            found = seen.found["numbers"][name]
            assert abs(found - value) <= 1e-4 * max(1, abs(value)), (name, found, value)
    return "of the last micro-batch" if last else ""


def shards(tool: str, subject: Subject) -> str:
    """Routers keep float32 weights; their logits are those of a whole one on the same states."""
    if tool.startswith("DDP"):
        raise RefusedError("not tried, since DDP keeps weights whole")
    if tool == "plain loop":
        raise RefusedError("not tried, since weights are whole in one process")
    ranks = _step(tool, subject, "shard_routers")
    routers = {site.path: site.router for site in running_sites(opened(subject))}
    for seen in ranks:
        assert all(g.dtype == torch.float32 for g in seen.gradients.values())
        pairs = zip(seen.found["inputs"], seen.found["captured"], strict=True)
        for inputs, captured in pairs:
            for path, (logits, _, experts) in captured.items():
                assert logits.dtype == torch.float32 and inputs[path].dtype == torch.bfloat16
                whole = routers[path](inputs[path].float())
                torch.testing.assert_close(logits, whole[0].detach())
                assert torch.equal(experts, whole[2])
    _near(ranks[0].gradients, _reference(tool, subject, ranks).gradients(), _room(tool))
    return ""


FEATURES: dict[str, Check] = {
    "capture": captures,
    "record and replay": replays,
    **{name: partial(losses, name) for name in SCOPES},
    "bias_balancing": balances,
    "pin_routes": pins,
    "router_statistics": statistics,
    "shard_routers": shards,
}


def results(out: Path, only: str = "") -> list[Result]:
    """Every feature in every tool, for a family of each contract; ``only``: a part of their names.

    Cells that ``out`` holds are not run again.
    """
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    found = [Result(*json.loads(line)) for line in lines]
    done = {(r.claim, r.kind, r.family) for r in found}
    for family, (feature, check), tool in product(LOOP_FAMILIES, FEATURES.items(), TOOLS):
        name = f"{feature}/{tool}/{family}"
        if only not in name or (feature, tool, family) in done:
            continue
        result = Result(feature, tool, family, _said(check, tool, Subject("stock", family)))
        print(f"{name}: {result.error or 'ok'}", file=sys.stderr, flush=True)
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        found.append(result)
    order = {cell: n for n, cell in enumerate(product(FEATURES, TOOLS, LOOP_FAMILIES))}
    return sorted(found, key=lambda r: order[r.claim, r.kind, r.family])


def _said(check: Check, tool: str, subject: Subject) -> str:
    """Nothing where it holds, a line that begins with refused or note, or an error."""
    notes: list[str] = []
    error = error_of(lambda one: notes.append(check(tool, one)), subject)
    refused = f"{RefusedError.__name__}: "
    if error.startswith(refused):
        return f"refused: {error.removeprefix(refused)}"
    return error or (f"note: {notes[0]}" if notes[0] else "")
