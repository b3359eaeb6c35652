"""What a training of a tool did, seen from outside of it, and the same recomputed by hand.

The decoder's calls and the gradients that its states got say what a tool computed, whatever its
loss is. ``Reference`` runs the calls again on a copy from before, with neither the tool nor this
package's features, and router losses and statistics are written out in float64.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from l2r.hf.swap.sites import running_sites, selection_biases

Routing = dict[str, tuple[Tensor, ...]]  # logits, weights, experts of each router of a call
NO_LABEL = -100


@dataclass
class Seen:
    """What one optimizer step of a rank did.

    calls: arguments of the decoder's calls with gradients; seeds: gradients of its states; trained:
    tokens [T] of each that a loss is computed of. given: experts that blocks gave to their experts
    in forwards, and again in recomputations, by layer. found: what a feature left.
    """

    calls: list[dict[str, Any]] = field(default_factory=list)
    seeds: list[Tensor] = field(default_factory=list)
    trained: list[Tensor] = field(default_factory=list)
    forward: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    again: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    gradients: dict[str, Tensor] = field(default_factory=dict)
    biases: dict[str, Tensor] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)

    def note_gradients(self, decoder: nn.Module) -> None:
        """Keep those that the optimizer will read."""
        named = ((n, p.grad) for n, p in decoder.named_parameters() if p.grad is not None)
        self.gradients = {name: whole(gradient) for name, gradient in named}


def in_backward() -> bool:
    """Whether a backward pass is running: torch's own number of it."""
    return bool(torch._C._current_graph_task_id() != -1)


def whole(value: Tensor) -> Tensor:
    """A tensor with all its shards, detached."""
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


@contextmanager
def watching(model: Any) -> Iterator[Seen]:
    """Note what a training of ``model`` does until its first optimizer step."""
    seen, decoder = Seen(), model.base_model

    def before(_: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if torch.is_grad_enabled() and not in_backward():
            assert not args
            seen.calls.append({**kwargs, "use_cache": False})

    def after(_: Any, args: Any, output: Any) -> None:
        states = output.last_hidden_state
        if states.requires_grad and not in_backward():
            states.register_hook(lambda gradient: seen.seeds.append(gradient.detach().clone()))

    def given(name: str) -> Callable[..., None]:
        def note(_: Any, args: tuple[Any, ...]) -> None:
            if torch.is_grad_enabled():
                (seen.again if in_backward() else seen.forward)[name].append(args[1].clone())

        return note

    hooks = [
        decoder.register_forward_pre_hook(before, with_kwargs=True),
        decoder.register_forward_hook(after),
        register_optimizer_step_pre_hook(lambda *_: seen.note_gradients(decoder)),
    ]
    for name, module in decoder.named_modules():
        if isinstance(inner := module._modules.get("experts"), nn.Module):
            hooks.append(inner.register_forward_pre_hook(given(name)))
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
    seen.biases = {path: whole(bias) for path, bias in selection_biases(model).items()}


class Noise:
    """Adds to what routers read other noise in each call, which no random state brings back."""

    def __init__(self, model: nn.Module) -> None:
        self._generator = torch.Generator().manual_seed(5)
        for site in running_sites(model):
            site.router.register_forward_pre_hook(self)

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        noise = torch.randn(args[0].shape, generator=self._generator, dtype=torch.float32)
        return (args[0] + (0.5 * noise).to(args[0]), *args[1:])


@dataclass
class Reference:
    """Calls of all ranks again, on a copy from before, one process and plain autograd.

    half: how the tool computes in bfloat16, as a block around a call. chosen: experts that routers
    are made to take, per rank, call and router.
    """

    start: Any
    ranks: Sequence[Seen]
    half: Callable[[], AbstractContextManager[Any]] = nullcontext
    chosen: Sequence[Sequence[Mapping[str, Tensor]]] | None = None

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.start).train()
        self._sites = {site.path: site for site in running_sites(self.model)}
        self.routing: list[list[Routing]] = []
        self._states: list[list[Tensor]] = []
        for number, seen in enumerate(self.ranks):
            rows = [self._call(number, at, call) for at, call in enumerate(seen.calls)]
            self._states.append([states for states, _ in rows])
            self.routing.append([routing for _, routing in rows])

    def _call(self, rank: int, at: int, call: Mapping[str, Any]) -> tuple[Tensor, Routing]:
        found: Routing = {}
        hooks = []
        for path, site in self._sites.items():

            def note(
                router: Any, args: Any, output: Any, path: str = path, site: Any = site
            ) -> Any:
                logits, weights, experts = output
                if self.chosen is not None:
                    given = self.chosen[rank][at][path]
                    experts = torch.where(given < 0, experts, given)
                    weights = _weigh(site.selection, logits, experts).to(weights.dtype)
                found[path] = (logits, weights, experts)
                return logits, weights, experts

            hooks.append(site.router.register_forward_hook(note))
        with self.half():
            states = self.model.base_model(**call).last_hidden_state
        for hook in hooks:
            hook.remove()
        return states, found

    @property
    def calls(self) -> list[tuple[Mapping[str, Any], Routing, Tensor]]:
        """Every call of every rank: its arguments, what routers gave, its trained tokens."""
        return [
            (call, routing, trained)
            for seen, routings in zip(self.ranks, self.routing, strict=True)
            for call, routing, trained in zip(seen.calls, routings, seen.trained, strict=True)
        ]

    def gradients(self, extra: Tensor | None = None) -> dict[str, Tensor]:
        """Gradients by the tool's own gradients of the states, mean over ranks, and ``extra``'s."""
        self.model.zero_grad()
        roots: list[Tensor] = [] if extra is None else [extra]
        seeds: list[Any] = [None] * len(roots)
        for seen, states in zip(self.ranks, self._states, strict=True):
            for seed, value in zip(seen.seeds, states, strict=True):
                roots.append(value)
                seeds.append(seed.to(value.dtype) / len(self.ranks))
        torch.autograd.backward(roots, seeds, retain_graph=True)
        named = self.model.base_model.named_parameters()
        return {n: p.grad.clone() for n, p in named if p.grad is not None}

    def balance(self, scope: str) -> Tensor:
        """L_bal of the step in float64, by the formulas of the papers."""
        losses = []
        for path, site in self._sites.items():
            rows, experts = [], len(self.calls[0][1][path][0][0])
            for call, routing, _ in self.calls:
                logits, _, chosen = routing[path]
                real = _real(call, len(logits))
                hot = torch.zeros(len(logits), experts, dtype=torch.float64)
                hot.scatter_(1, chosen, 1.0)
                rows.append((logits.double(), hot, real, _rows(call)))
            if scope == "sequence":
                losses.append(_by_sequence(rows, site.selection.gate))
            elif scope == "step":
                hot = torch.cat([h[real] for _, h, real, _ in rows])
                share = torch.cat([x.softmax(-1)[real] for x, _, real, _ in rows]).mean(0)
                losses.append(experts * (hot.mean(0) * share).sum())
            else:
                each = [(h[r].mean(0) * x.softmax(-1)[r].mean(0)).sum() for x, h, r, _ in rows]
                losses.append(experts * torch.stack(each).mean())
        return torch.stack(losses).mean()

    def moved(self, speed: float) -> dict[str, Tensor]:
        """Selection biases after a step, by the loads of all calls without padding."""
        found = {}
        for path, bias in selection_biases(self.start).items():
            load = self.load(path, lambda call, trained: _real(call, len(trained)))
            found[path] = bias - speed * torch.sign(load - load.mean()).float()
        return found

    def load(
        self,
        path: str,
        counted: Callable[[Mapping[str, Any], Tensor], Tensor],
        calls: Sequence[tuple[Mapping[str, Any], Routing, Tensor]] = (),
    ) -> Tensor:
        """Tokens [N] of each expert, in ``calls`` or all."""
        calls = calls or self.calls
        experts = calls[0][1][path][0].shape[1]
        parts = [r[path][2][counted(call, trained)].flatten() for call, r, trained in calls]
        return torch.bincount(torch.cat(parts), minlength=experts).double()

    def statistics(self, *, last: bool = False) -> dict[str, float]:
        """Numbers of the trained tokens, by layer, in float64; of the last call alone."""
        found: dict[str, float] = {}
        calls = self.calls[-1:] if last else self.calls
        for path, site in self._sites.items():
            load = self.load(path, lambda call, trained: trained, calls)
            pairs = [(r[path][0].double(), trained) for _, r, trained in calls]
            logits = torch.cat([values[trained] for values, trained in pairs]).detach()
            share, top = load / load.sum(), logits.sort(descending=True).values
            entropy = -(share * share.clamp_min(1e-300).log()).sum() / math.log(len(load))
            numbers = {
                "load_entropy": entropy,
                "max_over_mean": load.max() / load.mean(),
                "dead_experts": (load == 0).sum(),
                "mean_margin": (top[:, 0] - top[:, 1]).mean(),
                "z_loss": logits.logsumexp(-1).square().mean(),
                "balance_loss": (load / len(logits) * logits.softmax(-1).mean(0)).sum() * len(load),
            }
            found |= {f"router/{n}/layer-{site.layer}": float(v) for n, v in numbers.items()}
        return found


def _weigh(rule: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """Weights of given experts: scores over their sum, times the family's factor."""
    soft = rule.gate == "softmax"  # in float32; sigmoids in the dtype of the logits
    scores = (logits.float().softmax(-1) if soft else logits.sigmoid()).gather(1, experts)
    return scores / scores.sum(-1, keepdim=True) * rule.scale


def _real(call: Mapping[str, Any], tokens: int) -> Tensor:
    mask = call.get("attention_mask")
    return torch.ones(tokens, dtype=torch.bool) if mask is None else mask.flatten().bool()


def _rows(call: Mapping[str, Any]) -> int:
    return len(next(call[n] for n in ("input_ids", "inputs_embeds") if call.get(n) is not None))


def _by_sequence(rows: Sequence[tuple[Tensor, Tensor, Tensor, int]], gate: str) -> Tensor:
    """DeepSeek-V3's loss, Eq. 17 to 20: mean over sequences, then over calls."""
    means = []
    for logits, hot, real, count in rows:
        scores = logits.softmax(-1) if gate == "softmax" else logits.sigmoid()
        scores = scores / scores.sum(-1, keepdim=True)
        parts = zip(*(x.chunk(count) for x in (scores, hot, real)), strict=True)
        each = []
        for affinity, chosen, keep in parts:
            if keep.any():
                fraction = chosen[keep].mean(0) * chosen.shape[1] / chosen[0].sum()
                each.append((fraction * affinity[keep].mean(0)).sum())
        means.append(torch.stack(each).mean())
    return torch.stack(means).mean()
