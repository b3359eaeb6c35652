"""Upcycling: fit new routers to the decisions of the old ones, then maybe train on jointly.

The model runs once per batch with its own routers; every new router learns from what the old
one in its layer saw and said. Nothing is stored, the experts stay frozen, and layers are
independent of each other.

Shape letters: B rows, S tokens per row, T = B * S, N experts, K chosen.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from l2r.evaluation.perplexity import token_losses
from l2r.functional import load_balancing_loss, router_z_loss
from l2r.routers import MixtureRouter, Router, RouterConfig, capture, constrain
from l2r.swap.swap import Site, new_router, place_router, record_swap, select_sites
from l2r.training.agreement import compare, divergence, observe

Report = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True)
class FitOptions:
    """updates: optimizer steps per batch of activations, each on all its tokens.

    lr decays to zero with a cosine. joint_steps: steps of training everything afterwards, with
    the paper's losses (balance 0.01, z 0.001) beside the language-modeling loss; a tenth of
    them warm up.
    """

    updates: int = 4
    lr: float = 0.01
    joint_steps: int = 0
    joint_lr: float = 1e-4
    balance: float = 0.01
    z: float = 0.001

    def __post_init__(self) -> None:
        for name in ("lr", "joint_lr"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be > 0; got {name}={value}")
        for name in ("updates", "joint_steps", "balance", "z"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0; got {name}={getattr(self, name)}")


@dataclass(frozen=True)
class LayerFit:
    """How well the new router of one layer agrees with the old one, on held-out text.

    Agreement is the mean share of a token's K experts that both choose; divergence is in nats.
    """

    layer: int
    agreement_before: float
    agreement: float
    divergence_before: float
    divergence: float


@dataclass
class UpcycleReport:
    """Layers in order; perplexity on held-out text after each stage that was run."""

    layers: list[LayerFit]
    perplexity: dict[str, float] = field(default_factory=dict)

    @property
    def agreement(self) -> float:
        """Mean agreement over the layers after the fit."""
        return sum(layer.agreement for layer in self.layers) / len(self.layers)


def upcycle(
    model: Any,
    config: RouterConfig,
    batches: Sequence[Int[Tensor, "_ S"]],
    held_out: Sequence[Int[Tensor, "_ S"]],
    *,
    options: FitOptions | None = None,
    layers: Sequence[int] | None = None,
    report: Report = lambda stage, done, total: None,
) -> UpcycleReport:
    """Replace the routers of ``model`` in place by ones fitted to the old ones' decisions.

    ``batches`` are token ids to fit and train on, ``held_out`` others to measure on.
    ``options.updates=0`` leaves the new routers as they are drawn: copying nothing.
    Raises ValueError for empty batches and as ``swap_routers`` does.
    """
    options = options or FitOptions()
    for name, value in (("batches", batches), ("held_out", held_out)):
        if len(value) == 0:
            raise ValueError(f"{name} must hold at least one batch; got none")
    model.eval()
    sites = select_sites(model, layers)
    students = [_start(model, site, new_router(site, config)) for site in sites]
    result = UpcycleReport([])
    result.perplexity["original"] = perplexity(model, held_out)
    before = compare(model, sites, students, held_out)
    _place(model, sites, students)
    result.perplexity["swapped"] = perplexity(model, held_out)
    if options.updates:
        _place(model, sites, [site.router for site in sites])
        _fit(model, sites, students, batches, options, report)
        after = compare(model, sites, students, held_out)
        _place(model, sites, students)
        result.perplexity["fitted"] = perplexity(model, held_out)
    else:
        after = before
    result.layers = [
        LayerFit(site.layer, old[0], new[0], old[1], new[1])
        for site, old, new in zip(sites, before, after, strict=True)
    ]
    record_swap(model, config, sites)
    if options.joint_steps:
        train_jointly(model, batches, options, report)
        result.perplexity["trained"] = perplexity(model, held_out)
    return result


@torch.no_grad()
def perplexity(model: Any, batches: Sequence[Int[Tensor, "_ S"]]) -> float:
    """exp of the mean next-token cross-entropy over all batches."""
    total, count = 0.0, 0
    for ids in batches:
        losses = token_losses(model, ids)
        total, count = total + float(losses.sum()), count + losses.numel()
    return math.exp(total / count)


def train_jointly(
    model: Any, batches: Sequence[Tensor], options: FitOptions, report: Report
) -> None:
    """Train all weights for ``options.joint_steps`` batches, with the paper's auxiliary losses.

    Weights of 16 bits are trained as fp32 copies, since most updates are smaller than a step of
    theirs, and return to their dtype at the end.
    """
    with _wide_weights(model) as autocast:
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.joint_lr, betas=(0.9, 0.95))
        schedule = _cosine(optimizer, options.joint_steps, warmup=options.joint_steps // 10)
        model.train()
        for step in range(options.joint_steps):
            with autocast, capture(model) as record:
                loss = token_losses(model, batches[step % len(batches)]).mean()
            logits, indices = record.logits(), record.indices()
            loss = loss + options.balance * load_balancing_loss(logits, indices)
            loss = loss + options.z * router_z_loss(logits)
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            constrain(model)
            schedule.step()
            report("joint training", step + 1, options.joint_steps)
    model.eval()


@contextmanager
def _wide_weights(model: nn.Module) -> Iterator[AbstractContextManager[Any]]:
    """fp32 weights meanwhile; gives the autocast that runs the products of a bf16 model in bf16.

    An fp16 model computes in fp32, because its gradients would underflow without scaling.
    """
    dtypes = {parameter: parameter.dtype for parameter in model.parameters()}
    device = next(iter(dtypes)).device.type
    bf16 = torch.bfloat16 in dtypes.values()
    autocast = torch.autocast(device, torch.bfloat16) if bf16 else nullcontext()
    for parameter in dtypes:
        parameter.data = parameter.data.float()
    try:
        yield autocast
    finally:
        for parameter, dtype in dtypes.items():
            parameter.grad = None
            parameter.data = parameter.data.to(dtype)


def _start(model: nn.Module, site: Site, router: Router) -> Router:
    """A mixture of routers starts from the attention heads of its own layer, as its source does."""
    layer = model.get_submodule(site.path.rpartition(".")[0].rpartition(".")[0])
    attention = getattr(layer, "self_attn", None)
    query = getattr(attention, "q_proj", None)
    if isinstance(router, MixtureRouter) and isinstance(query, nn.Linear):
        router.start_from_heads(query.weight.to(router.projection.weight.dtype))
    return router


def _fit(
    model: Any,
    sites: Sequence[Site],
    students: Sequence[Router],
    batches: Sequence[Tensor],
    options: FitOptions,
    report: Report,
) -> None:
    parameters = [p for s in students for p in s.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=options.lr)
    schedule = _cosine(optimizer, options.updates * len(batches))
    for student in students:
        student.train()
    for done, ids in enumerate(batches, start=1):
        seen = observe(model, sites, ids)
        for _ in range(options.updates):
            loss = torch.stack(
                [
                    divergence(logits, student.logits(x), score=site.selection.score)
                    for site, student, (x, logits, _) in zip(sites, students, seen, strict=True)
                ]
            ).sum()
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            optimizer.step()
            for student in students:
                student.constrain()
            schedule.step()
        report("fit", done, len(batches))
    for student in students:
        student.eval()


def _place(model: nn.Module, sites: Sequence[Site], routers: Sequence[Any]) -> None:
    for site, router in zip(sites, routers, strict=True):
        place_router(model, site, router)


def _cosine(
    optimizer: torch.optim.Optimizer, steps: int, *, warmup: int = 0
) -> torch.optim.lr_scheduler.LambdaLR:
    def factor(step: int) -> float:
        rising = (step + 1) / (warmup + 1)
        return min(rising, 0.5 * (1 + math.cos(math.pi * min(step / steps, 1))))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
