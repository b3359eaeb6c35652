"""Checks of how experts are chosen and weighed, against the family's rule and the configuration.

Shape letters: T tokens, N experts, K experts chosen per token.
"""

import inspect
import sys
from dataclasses import fields
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
from l2r.hf.swap import FAMILIES, FAMILY_OF_ROUTER, Site
from l2r.routers import Router
from l2r.routers.selection_rule import Selection

_TIES = 0.01  # of the tokens may choose otherwise: with a bias, equals differ in their logits


def selection(subject: Subject) -> Finding:
    """The rule in force, experts per token and groups, against config.json and against itself."""
    for site in subject.sites:
        if impossible := _impossible(site):
            return fault(f"{in_layers([site])}: {impossible}", "correct config.json")
    for site in subject.sites:
        rule = site.selection
        if rule.family is None:
            if isinstance(site.router, Router) and rule != site.router.own_selection():
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
    rule = subject.sites[0].selection
    top_k, experts = (subject.sites[0].sizes[name] for name in ("top_k", "num_experts"))
    whose = f"of {rule.family}" if rule.family else "of the router itself"
    return ok(f"{top_k} of {experts} experts by the rule {whose}, as config.json says")


def bias(subject: Subject) -> Finding:
    """A selection bias that alone decides, or in a dtype that its small updates do not change."""
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
            "keep it in float32",
        )
    spread = max(float(tensor.max() - tensor.min()) for tensor in biased.values())
    return ok(f"the selection biases of {len(biased)} layers span at most {spread:.2f} of a score")


def weights(subject: Subject) -> Finding:
    """Experts and weights that a router returned, against those that its rule gives."""
    for site in subject.sites:
        if site.path not in subject.plain.routed:
            return fault(
                f"the router in {in_layers([site])} was not called in a forward pass",
                "put it where the family's block calls it (l2r.swap_routers)",
            )
        logits, returned, indices = subject.plain.routed[site.path]
        rule = site.selection
        expected = rule.weigh(site.router, logits, indices)
        gap = float((returned.float() - expected.float()).abs().max())
        if not gap <= _tolerance(returned, logits) * max(1.0, float(expected.float().abs().max())):
            sums = [float(value.float().sum(dim=1).mean()) for value in (returned, expected)]
            return fault(
                f"weights in {in_layers([site])} sum to {sums[0]:.3f}, by the rule {rule} to "
                f"{sums[1]:.3f}; largest difference {gap:.2g}",
                "something replaced the router's forward: load the model again",
            )
        share = _other_experts(site, rule, logits, indices)
        if share > _TIES:
            return fault(
                f"in {in_layers([site])} {share:.0%} of the tokens chose other experts than the "
                f"rule {rule} gives",
                "something replaced the router's forward: load the model again",
            )
    _, returned, _ = subject.plain.routed[subject.sites[0].path]
    return ok(
        f"the k weights sum to {float(returned.float().sum(dim=1).mean()):.3f}, as the rule gives"
    )


def _impossible(site: Site) -> str:
    """A contradiction inside a rule, in words."""
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
    entry = FAMILIES.get(family)
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
        rule = FAMILY_OF_ROUTER[entry.router].selection(router)
    except (TypeError, ValueError, AttributeError, KeyError):
        return None
    shape = attrgetter(entry.weight)(router).shape
    sizes = {"num_experts": shape[0], "hidden_size": shape[1], "top_k": int(router.top_k)}
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
    return None if path is None else subject.tensors(site)[path].detach().reshape(-1)


def _unreachable(site: Site, values: Tensor) -> int:
    """Experts that k others of their group outdo by more than scores can differ."""
    top_k, groups = site.sizes["top_k"], site.selection.groups
    grouped = values.float().view(groups, -1)
    ahead = (grouped[:, :, None] > grouped[:, None, :] + 1).sum(dim=1)
    return int((ahead >= top_k).sum())


def _other_experts(site: Site, rule: Selection, logits: Tensor, indices: Tensor) -> float:
    """Share of the tokens whose experts score otherwise than those of the rule, whatever the ties.

    0 where the block has a say.
    """
    if rule.block_bias:
        return 0.0
    _, expected = rule(site.router, logits)
    one, other = (logits.gather(1, chosen).sort(dim=1).values for chosen in (indices, expected))
    return float((one != other).any(dim=1).float().mean())


def _tolerance(*tensors: Tensor) -> float:
    """Half of the digits of the coarsest dtype."""
    return float(max(torch.finfo(tensor.dtype).eps for tensor in tensors)) ** 0.5
