"""The auxiliary objective from recorded router outputs, and the routing numbers to log (Eq. 14)."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from l2r.functional import (
    dead_experts,
    expert_usage,
    load_balancing_loss,
    peak_load,
    router_margin_loss,
    router_z_loss,
)
from l2r.functional.selection import largest_logit
from l2r.routers import Captured
from l2r.stats.entropy import normalized_entropy
from l2r_lab.training.recipes import LossSection


def auxiliary_losses(
    captured: Captured,
    section: LossSection,
    *,
    usage: Sequence[Tensor] | None = None,
) -> tuple[Tensor, dict[str, Float[Tensor, ""]]]:
    """Weighted sum lambda_bal L_bal + lambda_z L_z, and both losses unweighted.

    With a weight ``section.margin`` the margin loss too, as ``margin``. ``usage`` gives the f_i of
    every layer, over a whole step or as they are counted already. Raises ValueError when a weight
    is positive but no router was recorded, and for a margin where a selection has none.
    """
    logits, indices = captured.logits(), captured.indices()
    if not logits:
        raise ValueError("auxiliary losses have weights, but the model recorded no router outputs")
    balance = load_balancing_loss(logits, indices, variant=section.balance_variant, usage=usage)
    z = router_z_loss(
        logits, variant=section.z_variant, top_k=indices[0].shape[1], heads=captured.heads()
    )
    total = section.balance * balance + section.z * z
    parts = {"balance": balance.detach(), "z": z.detach()}
    if section.margin:
        margin = router_margin_loss(
            captured.rankings(), top_k=indices[0].shape[1], gap=section.margin_gap
        )
        total = total + section.margin * margin
        parts["margin"] = margin.detach()
    return total, parts


Loads = dict[str, list[Tensor]]


def expert_loads(captured: Captured) -> Loads:
    """Share of tokens [N] that chose each expert, by router and call; counted once for all."""
    return {
        name: [expert_usage(output.indices, output.logits.shape[1]) for output in calls]
        for name, calls in captured.outputs.items()
    }


def add_loads(total: Loads, loads: Loads) -> Loads:
    """Return sums by router and call; ``total`` may be empty. Nothing is changed in place."""
    if not total:
        return loads
    return {
        name: [a + b for a, b in zip(calls, loads[name], strict=True)]
        for name, calls in total.items()
    }


def layer_usage(
    captured: Captured, section: LossSection, loads: Loads
) -> list[Float[Tensor, " N"]]:
    """f_i of every layer, counted as the balance variant counts."""
    if section.balance_variant != "tutel":
        return [load for calls in loads.values() for load in calls]
    pairs = zip(captured.logits(), captured.indices(), strict=True)
    return [expert_usage(largest_logit(z, i), z.shape[1]) for z, i in pairs]


def routing_summary(loads: Loads) -> dict[str, list[float] | list[int]]:
    """Per layer: load entropy in [0, 1], max / mean load and the number of unused experts.

    ``loads`` may be shares or sums of them, over parts of a step of as many tokens each.
    """
    entropy, peak, dead = [], [], []
    for load in (load.cpu().double() for calls in loads.values() for load in calls):
        entropy.append(normalized_entropy(load.numpy()))
        peak.append(peak_load(load))
        dead.append(dead_experts(load))
    return {"load_entropy": entropy, "max_over_mean": peak, "dead_experts": dead}
