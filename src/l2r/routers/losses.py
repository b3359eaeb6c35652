"""Router losses of captured outputs, for any loop and any model, and the loads of a whole step.

Shape letters: T tokens, N experts, K experts chosen per token.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor, nn

from l2r.errors import InputError
from l2r.files.shared_settings import BalanceScope, BalanceVariant, ZVariant
from l2r.functional import (
    expert_counts,
    load_balancing_loss,
    router_margin_loss,
    router_z_loss,
    sequence_balance_loss,
)
from l2r.functional.losses import mean_over_layers
from l2r.functional.selection import best_experts, largest_logit
from l2r.routers.base import Router, RouterOutput
from l2r.routers.capture import Captured, RouterSite, observed
from l2r.routers.model_calls import ModelCall


class RouterLossValues(NamedTuple):
    """total: the weighted sum, to be added to the task loss. The others: unweighted, detached."""

    total: Float[Tensor, ""]
    balance: Float[Tensor, ""]
    z: Float[Tensor, ""]
    margin: Float[Tensor, ""]


@dataclass
class StepLoads:
    """Tokens that each expert of each router got in the micro-batches of a step.

    counts [N] and tokens are by router, of this rank. micro_batches: how many were counted.
    first_choice: count the first of a token's experts alone, as the balance variant tutel does.
    """

    first_choice: bool = False
    counts: dict[str, Int[Tensor, " N"]] = field(default_factory=dict)
    tokens: dict[str, Tensor] = field(default_factory=dict)
    micro_batches: int = 0
    _whole: "StepLoads | None" = None  # what ``over_ranks`` gave

    def add(self, site: RouterSite, x: Tensor, output: RouterOutput, call: ModelCall) -> None:
        """Count one output of a router."""
        del x
        self._whole = None
        mask = call.real(len(output.logits))
        indices = output.indices
        if self.first_choice:
            indices = largest_logit(output.logits, indices)
        counts = expert_counts(indices, output.logits.shape[1], mask=mask)
        count = indices.new_tensor(len(indices)) if mask is None else mask.sum().to(counts.device)
        known = site.path in self.counts
        self.counts[site.path] = self.counts[site.path] + counts if known else counts
        self.tokens[site.path] = self.tokens[site.path] + count if known else count

    def over_ranks(self) -> "StepLoads":
        """Sum the loads over all ranks, which call this together; one process returns itself."""
        if not (dist.is_available() and dist.is_initialized()):
            return self
        if self._whole is not None:
            return self._whole
        summed = StepLoads(self.first_choice, micro_batches=self.micro_batches)
        parts = [
            torch.cat([counts, self.tokens[name].reshape(1).to(counts)])
            for name, counts in self.counts.items()
        ]
        flat = torch.cat([part.to(parts[0].device) for part in parts])
        dist.all_reduce(flat)
        wholes = torch.split(flat, [len(part) for part in parts])
        for name, own, whole in zip(self.counts, parts, wholes, strict=True):
            part = whole.to(own.device)
            summed.counts[name], summed.tokens[name] = part[:-1], part[-1]
        self._whole = summed
        return summed


@contextmanager
def step_loads(model: nn.Module, *, first_choice: bool = False) -> Iterator[StepLoads]:
    """Count what experts get in all calls inside the block: a forward for each micro-batch.

    ``router_losses`` with ``balance_scope="step"`` takes them. Run the forwards under
    ``torch.no_grad()``; padding of their attention masks does not count, and running statistics of
    routers are afterwards as they were. ``first_choice``: as ``balance_variant="tutel"`` needs it.
    Raises ValueError for a model without routers of ours or of a supported family.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    kept = [(buffer, buffer.clone()) for router in routers for buffer in router.buffers()]
    loads, seen = StepLoads(first_choice), set[int]()
    calls: list[ModelCall] = []  # kept, so that no other call gets the number of one

    def add(site: RouterSite, x: Tensor, output: RouterOutput, call: ModelCall) -> None:
        loads.add(site, x, output, call)
        if id(call) not in seen:
            seen.add(id(call))
            calls.append(call)
            loads.micro_batches += 1

    try:
        with observed(model, add):
            yield loads
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def router_losses(
    captured: Captured,
    *,
    balance: float | int = 0.01,
    z: float | int = 0.0,
    margin: float | int = 0.0,
    balance_variant: BalanceVariant = "paper",
    balance_scope: BalanceScope = "microbatch",
    z_variant: ZVariant = "paper",
    margin_gap: float = 0.1,
    loads: StepLoads | None = None,
) -> RouterLossValues:
    """balance * L_bal + z * L_z + margin * L_margin of what ``capture`` recorded (Eq. 14).

    L_bal is ``load_balancing_loss`` of ``balance_variant``, and for ``balance_scope="sequence"``
    ``sequence_balance_loss``, DeepSeek-V3's, of the documents that ``position_ids`` or cumulative
    lengths tell apart. The scope ``step`` takes f from ``loads`` of ``step_loads``, over the
    micro-batches of a step and all ranks; without them f is that of the recorded calls, over all
    ranks. The mean of these losses over micro-batches and ranks is then that of the step as one
    batch. Padding of 2-D attention masks does not count, nor do calls without gradients while
    gradients are on, nor layers that choose by token ids.

    Raises ValueError for a weight that is negative or not finite, an unknown scope, a variant with
    the scope ``sequence``, ``loads`` of another scope or variant, a record without outputs, and
    outputs that carry no gradient.
    """
    check_settings(
        balance=balance, z=z, margin=margin, variant=balance_variant, scope=balance_scope
    )
    if loads is not None:
        _check_loads(loads, balance_variant, balance_scope)
    groups = _groups(captured)
    if not groups:
        raise InputError("no router output was recorded; the router losses would be off")
    _check_gradient(groups)
    usage = None
    if balance_scope == "step":
        if loads is None:
            loads = StepLoads(balance_variant == "tutel")
            for group in groups:
                for site, output in group.pairs:
                    loads.add(site, output.logits, output, group.call)
            loads.micro_batches = 1
        usage = _StepUsage(loads)
    found: list[list[Tensor]] = []
    for group in groups:
        with torch.set_grad_enabled(balance > 0 and torch.is_grad_enabled()):
            bal = _balance(group, balance_variant, balance_scope, usage)
        with torch.set_grad_enabled(z > 0 and torch.is_grad_enabled()):
            level = router_z_loss(
                group.logits, variant=z_variant, mask=group.mask, top_k=group.top_k,
                heads=group.heads,
            )  # fmt: skip
        apart = torch.zeros_like(level)
        if margin:
            rankings = [
                site.selection.ranking(site.router, out.logits) for site, out in group.pairs
            ]
            apart = router_margin_loss(rankings, top_k=group.top_k, gap=margin_gap, mask=group.mask)
        found.append([bal, level, apart])
    bal, level, apart = map(mean_over_layers, zip(*found, strict=True))
    if usage is not None:  # parts of one loss, not losses
        bal = bal * len(found)
    total = balance * bal + z * level + margin * apart
    return RouterLossValues(total, bal.detach(), level.detach(), apart.detach())


def check_settings(
    *, balance: float | int, z: float | int, margin: float | int, variant: str, scope: str
) -> None:
    """Raise ValueError for settings of ``router_losses`` that mean nothing."""
    for name, weight in (("balance", balance), ("z", z), ("margin", margin)):
        if not 0 <= weight < float("inf"):
            raise InputError(f"{name} must be >= 0 and finite; got {name}={weight}")
    if scope not in get_args(BalanceScope):
        allowed = ", ".join(get_args(BalanceScope))
        raise InputError(f"balance_scope must be one of {allowed}; got {scope!r}")
    if scope == "sequence" and variant != "paper":
        raise InputError(
            "balance_scope='sequence' is DeepSeek-V3's loss and has no variants; leave "
            f"balance_variant; got {variant!r}"
        )


def _check_loads(loads: StepLoads, variant: str, scope: str) -> None:
    if scope != "step":
        raise InputError(f"loads are for balance_scope='step'; got balance_scope={scope!r}")
    if loads.first_choice != (variant == "tutel"):
        raise InputError(
            "loads must be of step_loads(model, first_choice=True) for balance_variant='tutel', "
            f"else of step_loads(model); got first_choice={loads.first_choice} and {variant!r}"
        )


class _Group(NamedTuple):
    """Outputs of one call of the model that have as many tokens."""

    call: ModelCall
    pairs: list[tuple[RouterSite, RouterOutput]]

    @property
    def logits(self) -> list[Tensor]:
        return [output.logits for _, output in self.pairs]

    @property
    def indices(self) -> list[Tensor]:
        return [output.indices for _, output in self.pairs]

    @property
    def mask(self) -> Tensor | None:
        mask = self.call.real(len(self.pairs[0][1].logits))
        return mask if mask is None else mask.to(self.pairs[0][1].logits.device)

    @property
    def top_k(self) -> list[int]:
        return [output.indices.shape[1] for _, output in self.pairs]

    @property
    def heads(self) -> list[int]:
        return [getattr(site.router, "heads", 1) for site, _ in self.pairs]


def _groups(captured: Captured) -> list[_Group]:
    """Return outputs by the calls they are of, in the order of the calls."""
    found: dict[tuple[int, int], _Group] = {}
    trained = any(call.gradients for calls in captured.calls.values() for call in calls)
    apart = trained and torch.is_grad_enabled()
    for name, outputs in captured.outputs.items():
        site = captured.sites[name]
        if site.selection.by_token:
            continue
        for call, output in zip(captured.calls[name], outputs, strict=True):
            if call.gradients or not apart:
                key = id(call), len(output.logits)
                found.setdefault(key, _Group(call, [])).pairs.append((site, output))
    return list(found.values())


def _check_gradient(groups: list[_Group]) -> None:
    for group in (group for group in groups if group.call.gradients and torch.is_grad_enabled()):
        for site, output in group.pairs:
            if not output.logits.requires_grad and any(
                p.requires_grad for p in site.router.parameters()
            ):
                raise InputError(
                    f"router outputs carry no gradient ({site.path}), so their losses would be "
                    "off; activation checkpointing needs {'use_reentrant': False}"
                )


class _StepUsage:
    """f of every router over a step and all ranks, and the part of the step that tokens are."""

    def __init__(self, loads: StepLoads) -> None:
        whole = loads.over_ranks()
        ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        self._whole, self._times = whole, ranks * max(1, loads.micro_batches)

    def of(self, site: RouterSite) -> Float[Tensor, " N"]:
        counts, tokens = self._whole.counts[site.path], self._whole.tokens[site.path]
        return counts.float() / tokens.clamp_min(1)

    def part(self, site: RouterSite, tokens: Tensor | int) -> Tensor:
        """Factor with which the mean over micro-batches and ranks weighs all tokens alike."""
        return self._times * tokens / self._whole.tokens[site.path].clamp_min(1)


def _balance(
    group: _Group, variant: BalanceVariant, scope: BalanceScope, step: _StepUsage | None
) -> Tensor:
    logits, mask = group.logits, group.mask
    if scope == "sequence":
        affinities = [site.selection.affinities(output.logits) for site, output in group.pairs]
        documents = group.call.documents(len(logits[0]), logits[0].device)
        # DeepSeek-V3 counts the largest affinities, which are in the order of the logits.
        counted = [best_experts(z, k) for z, k in zip(logits, group.top_k, strict=True)]
        return sequence_balance_loss(affinities, counted, documents, mask=mask)
    if step is None:
        return load_balancing_loss(logits, group.indices, variant=variant, mask=mask)
    usage = [step.of(site) for site, _ in group.pairs]
    loss = load_balancing_loss(logits, group.indices, variant=variant, mask=mask, usage=usage)
    tokens = len(logits[0]) if mask is None else mask.sum()
    return loss * step.part(group.pairs[0][0], tokens)
