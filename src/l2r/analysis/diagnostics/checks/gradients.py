"""Checks of the backward pass: frozen routers, gradients that are zero, recomputation."""

import math
from collections.abc import Mapping

from torch import Tensor

from l2r.analysis.diagnostics.checks.finding import Finding, fault, in_layers, ok, skipped, warning
from l2r.analysis.diagnostics.checks.subject import Subject
from l2r.hf.swap import Site, trainable_parameters
from l2r.routers import Router
from l2r.routers.capture import is_reentrant
from l2r.routers.selection_rule import Selection


def trainable(subject: Subject) -> Finding:
    """Routers that are frozen while other parameters train."""
    if not any(parameter.requires_grad for parameter in subject.model.parameters()):
        return skipped("no parameter of the model trains")
    frozen = [
        site
        for site in subject.sites
        if not any(p.requires_grad for p in trainable_parameters(site).values())
    ]
    if frozen:
        return warning(
            f"the routers in {in_layers(frozen)} are frozen while other parameters train",
            "keep it so if freeze_routers was meant; else set requires_grad_(True)",
        )
    return ok("every router trains")


def gradient(subject: Subject) -> Finding:
    """Check that the task loss reaches every router parameter that trains."""
    if reason := _nothing_to_reach(subject):
        return skipped(reason)
    alone = [s for s in subject.sites if s.selection.normalize and s.sizes["top_k"] == 1]
    if alone:
        return fault(
            f"the one normalized weight in {in_layers(alone)} is always 1: the task loss trains no "
            "router",
            "choose two experts or more, or do not normalize",
        )
    found = subject.gradients
    bad = [
        name for name, value in found.items() if value is not None and not value.isfinite().all()
    ]
    if bad:
        return fault(
            f"the gradient of {bad[0]} is not finite", "look for overflow in the router's inputs"
        )
    none = [
        name
        for name, value in found.items()
        # PEFT's second factor begins at zero, so that the first gets no gradient in the first step.
        if (value is None or not bool(value.any())) and ".lora_A." not in name
    ]
    settled = [site for site in subject.sites if _is_settled(subject, site)]
    if none and all(any(name.startswith(f"{site.path}.") for site in settled) for name in none):
        return warning(
            f"{type(settled[0].selection).__name__} gave every token in {in_layers(settled)} "
            "weights of 1, which have no gradient: none was near a tie",
            "check with other text",
        )
    if none:
        return fault(
            f"the task loss gives {len(none)} of {len(found)} router parameters no gradient, first "
            f"{none[0]}",
            "the experts' outputs must be multiplied by the weights that the router returns",
        )
    norm = math.sqrt(
        sum(float(value.float().square().sum()) for value in found.values() if value is not None)
    )
    return ok(f"the task loss reaches {len(found)} router parameters, gradient norm {norm:.2g}")


def balance_gradient(subject: Subject) -> Finding:
    """Check that the balance loss reaches the routers that train, whatever its value."""
    if subject.own_loss is None and not (subject.balance > 0 or subject.z > 0):
        return skipped("neither the model nor the training has a balance loss")
    if reason := _nothing_to_reach(subject):
        return skipped(reason)
    found = subject.balance_gradients
    sites = [site for site in subject.sites if _of(site, found)]
    cut = [site for site in sites if all(value is None for value in _of(site, found))]
    if cut:
        return (fault if subject.loss_is_on else warning)(
            f"the balance loss gives the routers in {in_layers(cut)} no gradient: it has the right "
            "value and trains nothing",
            "something detaches the router logits, such as a hook or a wrapper that logs them",
        )
    reached = [value for value in found.values() if value is not None]
    bad = [n for n, value in found.items() if value is not None and not value.isfinite().all()]
    if bad:
        return fault(
            f"the balance loss's gradient of {bad[0]} is not finite",
            "look for overflow in the router's inputs",
        )
    norm = math.sqrt(sum(float(value.float().square().sum()) for value in reached))
    return ok(
        f"the balance loss reaches {len(reached)} router parameters, gradient norm {norm:.2g}"
    )


def _of(site: Site, gradients: Mapping[str, Tensor | None]) -> list[Tensor | None]:
    """Gradients of the parameters of a router that train."""
    return [value for name, value in gradients.items() if name.startswith(f"{site.path}.")]


def _is_settled(subject: Subject, site: Site) -> bool:
    """Tell whether a rule like SparseMixer, which looks at experts near a tie alone, found none."""
    own = type(site.selection).__call__ is not Selection.__call__
    return own and bool((subject.weights_of_gradients(site) == 1).all())


def _nothing_to_reach(subject: Subject) -> str:
    if subject.is_offloaded:
        return "weights are offloaded"
    if all(site.sizes["num_experts"] == 1 for site in subject.sites):
        return "no layer has two experts to choose from"
    parameters = (p for site in subject.sites for p in trainable_parameters(site).values())
    return "" if any(p.requires_grad for p in parameters) else "no router parameter trains"


def checkpointing(subject: Subject) -> Finding:
    """Reentrant activation checkpointing, under which recorded logits carry no gradient."""
    checkpointed = [
        module
        for module in subject.model.modules()
        if getattr(module, "gradient_checkpointing", False)
        and hasattr(module, "_gradient_checkpointing_func")
    ]
    if not checkpointed:
        return ok("activation checkpointing is off")
    if not any(is_reentrant(module) for module in checkpointed):
        return ok("activation checkpointing is not reentrant")
    found = "activation checkpointing is reentrant: router losses would have no gradient"
    remedy = "enable it with {'use_reentrant': False}"
    ours = any(isinstance(site.router, Router) for site in subject.sites)
    return (fault if ours or subject.loss_is_on else warning)(found, remedy)
