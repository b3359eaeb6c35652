"""Fit new routers to the decisions of the ones that they replace; nothing else is trained.

The model runs once per batch with its own routers; every new router learns from the input, the
logits and the chosen experts of the old one in its layer. Nothing is stored, the experts stay
frozen, and layers are independent of each other.

Shape letters: B rows, S tokens per row, T = B * S, N experts, K chosen.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn
from tqdm.auto import tqdm

from l2r.errors import InputError
from l2r.fitting.fit_options import FitOptions
from l2r.fitting.teacher_agreement import agreement, compare, divergence, observe
from l2r.hf.swap import Site, forget_replaced, place_router, unfitted_sites
from l2r.routers import Router
from l2r.routers.observe import evaluating
from l2r.routers.offload import device_of
from l2r.text import spread_rows, token_losses

FitProgress = Callable[..., None]  # stage, done, total; a fit gives its agreement as ``note``


@dataclass(frozen=True)
class LayerFit:
    """Agreement of the new router of one layer with the old one, on held-out text.

    Agreement is the mean share of a token's K experts that both choose; divergence is in nats.
    """

    layer: int
    agreement_before: float
    agreement: float
    divergence_before: float
    divergence: float


@dataclass
class FitReport:
    """Layers in order; perplexity on held-out text after each stage that was run."""

    layers: list[LayerFit]
    perplexity: dict[str, float] = field(default_factory=dict)

    @property
    def agreement(self) -> float:
        """Mean agreement over the layers after the fit."""
        return sum(layer.agreement for layer in self.layers) / len(self.layers)


def fit_routers(
    model: Any,
    data: Iterable[str] | Iterable[Int[Tensor, "_ S"]],
    *,
    tokenizer: Any = None,
    held_out: Iterable[str] | Iterable[Int[Tensor, "_ S"]] | None = None,
    sequence_length: int = 256,
    batch_size: int = 8,
    options: FitOptions | None = None,
    report: FitProgress | None = None,
) -> FitReport:
    """Fit the routers that ``swap_routers`` drew to the ones that they replaced.

    ``data`` are texts, which need the model's ``tokenizer``, or batches of token ids, all read at
    once; ``held_out`` are others to measure on, by default the last tenth of ``data``, which is
    then not fitted on. ``sequence_length`` and ``batch_size`` cut texts into batches. The experts
    and all else stay as they are. Without a ``report`` a progress bar shows the agreement.

    Gives agreement per layer before and after the fit, and perplexity on the held-out data of the
    original, the swapped and the fitted model. All are means over tokens. Gradients, modes and what
    trains are afterwards as they were. Raises ValueError for a model in which no router
    waits for a fit (it was loaded, copied or fitted already), for frozen routers, where gradients
    are off, and for too little data.
    """
    pairs = unfitted_sites(model)
    if not pairs:
        raise InputError(
            "model must hold routers that swap_routers drew in this process and nothing fitted "
            "since; fit right after the swap, or use l2r swap CKPT --fit --data PATH"
        )
    sites, students = [site for site, _ in pairs], [student for _, student in pairs]
    options = options or FitOptions()
    if options.updates:
        check_trainable(sites, students)
    if isinstance(data, str) or isinstance(held_out, str):
        raise InputError("data and held_out must be sequences of texts or batches; got one str")
    cut = Cut(tokenizer, sequence_length, batch_size, device_of(model))
    fitted: list[Any] = list(data)
    if held_out is None:
        count = len(fitted) - max(1, len(fitted) // 10)
        fitted, held_out = fitted[:count], fitted[count:]
    batches, other = cut.batches(fitted), cut.batches(list[Any](held_out))
    with ExitStack() as stack:
        for module in (model, *(site.router for site in sites)):
            stack.enter_context(evaluating(module))
        shown = stack.enter_context(_bar() if report is None else nullcontext(report))
        result = fit_sites(model, sites, students, batches, other, options, shown)
    forget_replaced(students)
    return result


def fit_sites(
    model: Any,
    sites: Sequence[Site],
    students: Sequence[Router],
    batches: Sequence[Int[Tensor, "_ S"]],
    held_out: Sequence[Int[Tensor, "_ S"]],
    options: FitOptions,
    report: FitProgress,
) -> FitReport:
    """Fit ``students`` to the routers in ``sites``, in whose places they stand at the end.

    The model is in evaluation mode. Raises ValueError for empty batches, and as ``fit_routers`` for
    frozen routers and where gradients are off.
    """
    if options.updates:
        check_trainable(sites, students)
    for name, value in (("batches", batches), ("held_out", held_out)):
        if len(value) == 0:
            raise InputError(f"{name} must hold at least one batch; got none")
    teachers = [site.router for site in sites]
    result = FitReport([])
    _place(model, sites, teachers)
    try:
        result.perplexity["original"] = perplexity(model, held_out)
        before = compare(model, sites, students, held_out)
        _place(model, sites, students)
        result.perplexity["swapped"] = perplexity(model, held_out)
        after = before
        if options.updates:
            _place(model, sites, teachers)
            _fit(model, sites, students, batches, options, report)
            after = compare(model, sites, students, held_out)
    finally:
        _place(model, sites, students)
    if options.updates:
        result.perplexity["fitted"] = perplexity(model, held_out)
    result.layers = [
        LayerFit(site.layer, old[0], new[0], old[1], new[1])
        for site, old, new in zip(sites, before, after, strict=True)
    ]
    return result


@contextmanager
def _bar() -> Iterator[FitProgress]:
    """Show a bar on standard error, with the agreement behind it."""
    with tqdm(desc="fit") as bar:

        def report(stage: str, done: int, total: int, note: str = "") -> None:
            bar.total = total
            bar.set_postfix_str(note, refresh=False)
            bar.update(done - bar.n)

        yield report


def _agreement_note(
    model: Any,
    sites: Sequence[Site],
    students: Sequence[Router],
    seen: Sequence[tuple[Tensor, Tensor, Tensor]],
) -> str:
    """Write the mean agreement over layers in words, and the layer that agrees least."""
    shares = {
        site.layer: float(agreement(model, site, student, x, indices))
        for site, student, (x, _, indices) in zip(sites, students, seen, strict=True)
    }
    least = min(shares, key=shares.__getitem__)
    mean = sum(shares.values()) / len(shares)
    return f"agreement {mean:.2f}, least {shares[least]:.2f} in layer {least}"


def _fit(
    model: Any,
    sites: Sequence[Site],
    students: Sequence[Router],
    batches: Sequence[Tensor],
    options: FitOptions,
    report: FitProgress,
) -> None:
    parameters = [p for s in students for p in s.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=options.lr)
    schedule = cosine(optimizer, options.updates * len(batches))
    with _training(students, parameters):
        for done, ids in enumerate(batches, start=1):
            seen = observe(model, sites, ids)
            note = _agreement_note(
                model, sites, students, seen
            )  # before it is fitted to this batch
            for _ in range(options.updates):
                optimizer.zero_grad(set_to_none=True)
                torch.autograd.backward(
                    [
                        divergence(logits, student.logits(x), gate=site.selection.gate)
                        for site, student, (x, logits, _) in zip(sites, students, seen, strict=True)
                    ]
                )
                optimizer.step()
                for student in students:
                    student.constrain()
                schedule.step()
            report("fit", done, len(batches), note)


@contextmanager
def _training(students: Sequence[Router], parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Training mode inside the block; afterwards evaluation, and the gradients of before."""
    before = [parameter.grad for parameter in parameters]
    for student in students:
        student.train()
    try:
        yield
    finally:
        for student in students:
            student.eval()
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def _place(model: nn.Module, sites: Sequence[Site], routers: Sequence[Any]) -> None:
    for site, router in zip(sites, routers, strict=True):
        place_router(model, site, router)


def cosine(
    optimizer: torch.optim.Optimizer, steps: int, *, warmup: int = 0
) -> torch.optim.lr_scheduler.LambdaLR:
    """Rise linearly over ``warmup`` steps, then fall to zero along a cosine."""

    def factor(step: int) -> float:
        rising = (step + 1) / (warmup + 1)
        return min(rising, 0.5 * (1 + math.cos(math.pi * min(step / steps, 1))))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


@torch.no_grad()
def perplexity(model: Any, batches: Sequence[Int[Tensor, "_ S"]]) -> float:
    """exp of the mean next-token cross-entropy over all batches."""
    total, count = 0.0, 0
    for ids in batches:
        losses = token_losses(model, ids)
        total, count = total + float(losses.sum()), count + losses.numel()
    return math.exp(total / count)


class Cut(NamedTuple):
    """tokenizer, length and size: of texts; batches of token ids stay as they are."""

    tokenizer: Any
    length: int
    size: int
    device: torch.device

    def batches(self, data: Sequence[str] | Sequence[Tensor]) -> list[Tensor]:
        """Batches [B, S] of token ids on the device. Raises ValueError for too little data."""
        texts = [part for part in data if isinstance(part, str)]
        tensors = [part for part in data if isinstance(part, Tensor)]
        if len(texts) + len(tensors) < len(data) or (texts and tensors):
            kinds = ", ".join(sorted({type(part).__name__ for part in data}))
            raise InputError(f"data must hold texts or tensors of token ids; got {kinds}")
        if texts and self.tokenizer is None:
            raise InputError("data that are texts need a tokenizer; pass tokenizer=...")
        if texts:
            rows = spread_rows(self.tokenizer, [texts], sys.maxsize, self.length).rows
            if not rows:
                raise InputError(
                    f"data must give at least {self.length} tokens to fit on and as many to "
                    f"measure on; got fewer; give more text or a shorter sequence_length"
                )
            tensors = list(torch.split(torch.stack(rows), self.size))
        if not tensors:
            raise InputError(
                "data must hold at least two texts or batches; got fewer: split a long text"
            )
        return [ids.to(self.device) for ids in tensors]


def check_gradients() -> None:
    """Raise ValueError where torch records no gradients."""
    if not torch.is_grad_enabled():  # off in inference mode, too
        raise InputError(
            "routers are fitted by gradients, which are off here; call it outside of "
            "torch.no_grad() and torch.inference_mode()"
        )


def check_trainable(sites: Sequence[Site], students: Sequence[Router]) -> None:
    """Raise ValueError where gradients are off, or a new router has no parameter that trains."""
    check_gradients()
    pairs = zip(sites, students, strict=True)
    frozen = [s.layer for s, new in pairs if not any(p.requires_grad for p in new.parameters())]
    if frozen:
        raise InputError(
            f"the new routers must train to be fitted; those of layers {frozen!s:.60} are frozen: "
            "set requires_grad_(True) on them, and freeze after the fit"
        )
