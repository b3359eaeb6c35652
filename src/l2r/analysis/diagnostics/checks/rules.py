"""Checks of how experts are chosen and weighed, against the family's rule and the configuration.

Shape letters: T tokens, N experts, K experts chosen per token.
"""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from l2r.analysis.diagnostics.checks.finding import (
    Finding,
    counted,
    fault,
    in_layers,
    ok,
    skipped,
    warning,
)
from l2r.analysis.diagnostics.checks.subject import Subject
from l2r.hf.swap import FAMILIES, Site, Unmatched
from l2r.routers import Router
from l2r.routers.observe import block_bias, evaluating
from l2r.routers.selection_rule import Selection

_BIAS_UPDATE = 0.001  # by which a step of loss-free balancing moves a bias
_TIES = 0.01  # of the tokens may choose otherwise, where two scores differ by a rounding


def selection(subject: Subject) -> Finding:
    """Compare the rule in force, experts per token and groups with config.json and itself."""
    if note := _unmatched(subject):
        return skipped(note)
    for site in subject.sites:
        if impossible := _impossible(site):
            return fault(f"{in_layers([site])}: {impossible}", "correct config.json")
    for site in subject.sites:
        rule = site.selection
        if rule.family is None:
            if isinstance(site.router, Router) and rule != site.router.configured_selection():
                return warning(
                    f"{in_layers([site])} selects by {rule}, which no configuration records",
                    "a saved model selects otherwise when it is loaded: set the rule again",
                )
            wanted: dict[str, Any] = {}
        else:
            expected = _expected(subject, site, rule.family)
            if expected is None:
                return skipped(f"no {rule.family} router can be built from this configuration")
            wanted = expected
        differs = _differences(site, wanted)
        if differs:
            return fault(
                f"{in_layers([site])} differs from config.json: {', '.join(differs)}",
                "change config.json and load the model again: routers read it when they are built",
            )
    first, rule = subject.sites[0], subject.sites[0].selection
    top_k, experts = (first.sizes[name] for name in ("top_k", "num_experts"))
    whose = f"by the rule of {rule.family}" if rule.family else "by the rule of the router itself"
    where = ", as config.json says"
    if not isinstance(first.router, Router) and first.family.note:
        whose, where = f"as config.json says; {rule.family} is", f" {first.family.note}"
    return ok(f"{top_k} of {experts} experts {whose}{where}")


def bias(subject: Subject) -> Finding:
    """Find a selection bias that alone decides, or whose dtype loses its small updates."""
    biased = {
        site: tensor for site in subject.sites if (tensor := _bias(subject, site)) is not None
    }
    if not biased:
        return ok("no router keeps a selection bias")
    unreachable = {site: _unreachable(site, tensor) for site, tensor in biased.items()}
    never = [site for site, count in unreachable.items() if count]
    if never:
        experts = counted(unreachable[never[0]], "expert")
        return fault(
            f"the selection bias in {in_layers(never)} keeps {experts} from "
            "ever being chosen: scores lie between 0 and 1, and others are ahead by more",
            "set the bias to zero, or lower the speed of its updates",
        )
    narrow = [site for site, tensor in biased.items() if tensor.dtype.itemsize < 4]
    if narrow:
        return warning(
            f"the selection bias in {in_layers(narrow)} is {biased[narrow[0]].dtype}, in which "
            "updates of 0.001 are lost",
            "keep it in float32, as l2r.bias_balancing and add_bias_balancing make it",
        )
    for site, tensor in biased.items():
        step = _bf16_step(tensor)
        if step >= _BIAS_UPDATE:
            return warning(
                f"the selection bias in {in_layers([site])} holds bfloat16 numbers, in steps of "
                f"{step:.2g} at {float(tensor.abs().max()):.2g}: {_values_of(tensor)} values for "
                f"{counted(len(tensor), 'expert')}",
                "it was rounded when it was saved: take it from a checkpoint with float32, or "
                "go on from it with l2r.bias_balancing or add_bias_balancing, which keep float32",
            )
    spread = max(float(tensor.max() - tensor.min()) for tensor in biased.values())
    return ok(f"the selection biases of {len(biased)} layers span at most {spread:.2f} of a score")


def weights(subject: Subject) -> Finding:
    """Experts and weights that a router returned, against those that its rule gives."""
    if note := _unmatched(subject):
        return skipped(note)
    for site in subject.sites:
        if site.path not in subject.plain.routed:
            return fault(
                f"the router in {in_layers([site])} was not called in a forward pass",
                "put it where the family's block calls it (l2r.swap_routers)",
            )
        logits, returned, indices = subject.plain.routed[site.path]
        rule = site.selection
        with evaluating(site.router):  # some families draw their experts in training
            expected = rule.weigh(site.router, logits, indices)
            share = _other_experts(subject, site, logits, indices)
        gap = float((returned.float() - expected.float()).abs().max())
        if not gap <= _tolerance(returned, logits) * max(1.0, float(expected.float().abs().max())):
            sums = [float(value.float().sum(dim=1).mean()) for value in (returned, expected)]
            return fault(
                f"weights in {in_layers([site])} sum to {sums[0]:.3f}, by the rule {rule} to "
                f"{sums[1]:.3f}; largest difference {gap:.2g}",
                "something replaced the router's forward: load the model again",
            )
        if share > _TIES:
            return fault(
                f"in {in_layers([site])} {share:.0%} of the tokens chose other experts than the "
                f"rule {rule} gives",
                "something replaced the router's forward: load the model again",
            )
    for site in subject.sites:
        share = _saturated(site, subject.plain.routed[site.path][0])
        if share > _TIES:
            return warning(
                f"in {in_layers([site])} the scores of {share:.0%} of the tokens are saturated: "
                "the last expert chosen and the next have the same, 0 or 1, and the order of the "
                "experts decides",
                "the router's logits are too large: train with a z-loss or a lower learning rate",
            )
    _, returned, _ = subject.plain.routed[subject.sites[0].path]
    return ok(
        f"the k weights sum to {float(returned.float().sum(dim=1).mean()):.3f}, as the rule gives"
    )


def _bf16_step(bias: Tensor) -> float:
    """Distance of neighbors in bfloat16 at the largest bias, 0 where others than these are held."""
    wide = bias.float()
    if not torch.equal(wide, wide.bfloat16().float()) or _values_of(wide) < 3:
        return 0.0
    return float(torch.finfo(torch.bfloat16).eps * 2 ** wide.abs().max().log2().floor())


def _values_of(bias: Tensor) -> int:
    return len(set(bias.tolist()))


def _unmatched(subject: Subject) -> str:
    """Say what is known of routers that follow no rule of the table; nothing if all do."""
    notes = (s.family.note for s in subject.sites if isinstance(s.selection, Unmatched))
    return next(notes, "")


def _impossible(site: Site) -> str:
    """Describe a contradiction inside a rule."""
    rule, experts, top_k = site.selection, site.sizes["num_experts"], site.sizes["top_k"]
    if not 1 <= top_k <= experts:
        return f"top_k={top_k} of {experts} experts"
    if experts % rule.groups:
        return f"{experts} experts do not divide into {rule.groups} groups"
    if not 1 <= rule.kept_groups <= rule.groups:
        return f"{rule.kept_groups} groups are kept of {rule.groups}"
    left = experts // rule.groups * rule.kept_groups
    if top_k > left:
        return f"{top_k} experts are chosen of {left} in {rule.kept_groups} of {rule.groups} groups"
    return ""


def _expected(subject: Subject, site: Site, family: str) -> dict[str, Any] | None:
    """Rule and sizes of the family's own router, built from the configuration without storage."""
    stock = not isinstance(site.router, Router)
    entry = site.family if stock else FAMILIES.get(family)
    modules = [sys.modules[base.__module__] for base in type(subject.model).__mro__]
    modules += [sys.modules[type(site.router).__module__]]
    kinds = [
        getattr(module, entry.router)
        for module in modules
        if entry and hasattr(module, entry.router)
    ]
    if entry is None or not kinds:
        return None
    arguments = (subject.config, site.layer)[: len(inspect.signature(kinds[0]).parameters)]
    try:
        with torch.device("meta"):
            router = kinds[0](*arguments)
        rule = entry.selection(router)
    except (TypeError, ValueError, AttributeError, KeyError):
        return None
    shape = attrgetter(entry.weight)(router).shape
    sizes = {
        "num_experts": shape[0],
        "hidden_size": shape[1],
        "top_k": int(attrgetter(entry.top_k)(router)),
    }
    return {**sizes, **_values(rule)}


def _differences(site: Site, wanted: dict[str, Any]) -> list[str]:
    have = {**site.sizes, **_values(site.selection)}
    return [
        f"{name}={have[name]!r} where it says {value!r}"
        for name, value in wanted.items()
        if have.get(name) != value
    ]


def _values(rule: Selection) -> dict[str, Any]:
    return {field.name: getattr(rule, field.name) for field in fields(rule)}


def _bias(subject: Subject, site: Site) -> Tensor | None:
    path = site.selection.bias
    if path is not None:
        return subject.tensors(site)[path].detach().reshape(-1)
    return next((bias.detach() for bias in _of_block(subject, site) if not bias.is_meta), None)


def _of_block(subject: Subject, site: Site) -> tuple[Tensor, ...]:
    """Return the selection bias that the block passes to its router, or nothing."""
    return block_bias(subject.model, site.path) if site.selection.block_bias else ()


def _unreachable(site: Site, values: Tensor) -> int:
    """Experts that k others of their group outdo by more than scores can differ.

    0 where the bias is added to what has no bounds.
    """
    if site.selection.gate == "sqrtsoftplus" or site.selection.biased == "logits":
        return 0
    top_k, groups = site.sizes["top_k"], site.selection.groups
    grouped = values.float().view(groups, -1)
    ahead = (grouped[:, :, None] > grouped[:, None, :] + 1).sum(dim=1)
    return int((ahead >= top_k).sum())


def _other_experts(subject: Subject, site: Site, logits: Tensor, indices: Tensor) -> float:
    """Share of the tokens whose experts score otherwise than the rule's, whatever the ties.

    Scores that are equal when rounded are ties, though their logits differ; so are the sums of
    groups. 0 where a token's id chooses, or a bias of the block that is elsewhere or in half
    precision: sums of it and scores tie often.
    """
    bias = _of_block(subject, site)
    narrow = any(each.is_meta or min(each.itemsize, logits.itemsize) < 4 for each in bias)
    if narrow or site.by_token:
        return 0.0
    # Families differ in the dtype in which they score logits of half precision.
    widths = {logits.dtype, torch.promote_types(logits.dtype, torch.float32)}
    differs = [_differs(site, logits.to(width), indices, bias) for width in widths]
    return float(torch.stack(differs).all(dim=0).float().mean())


def _differs(site: Site, logits: Tensor, indices: Tensor, bias: Sequence[Tensor]) -> Tensor:
    """Tell for each token whether its experts score otherwise than those of the rule."""
    rule = site.selection
    _, expected = rule(site.router, logits, *bias)
    orders = [logits]
    if type(rule).__call__ is Selection.__call__:
        orders.append(rule.scores(site.router, logits, *bias))
    pairs = [[part.gather(1, i).sort(dim=1).values for i in (indices, expected)] for part in orders]
    differs = torch.stack([(one != other).any(dim=1) for one, other in pairs]).all(dim=0)
    if rule.kept_groups < rule.groups:
        grouped = orders[1].view(len(logits), rule.groups, -1)
        quality = grouped.topk(rule.group_best, dim=-1).values.sum(dim=-1)
        best = quality.topk(rule.kept_groups + 1, dim=-1).values
        differs &= best[:, -1] != best[:, -2]
    return differs


def _saturated(site: Site, logits: Tensor) -> float:
    """Share of the tokens whose k-th and next score are both 0 or both 1, in float32."""
    rule, top_k = site.selection, site.sizes["top_k"]
    if top_k == logits.shape[1] or type(rule) is not Selection or rule.biased == "logits":
        return 0.0
    scores = replace(rule, bias=None, block_bias=False).scores(site.router, logits.float())
    last, following = scores.topk(top_k + 1, dim=1).values[:, -2:].unbind(dim=1)
    tied = (last == following) & ((last == 0) | (last == 1))
    return float(tied.float().mean())


def _tolerance(*tensors: Tensor) -> float:
    """Half of the digits of the coarsest dtype."""
    return float(max(torch.finfo(tensor.dtype).eps for tensor in tensors)) ** 0.5
