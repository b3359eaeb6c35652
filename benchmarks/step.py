"""A whole training step: our model and loop against transformers', on the same batches."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bench import Bench, main
from l2r.functional import load_balancing_loss, router_z_loss
from l2r.routers import capture
from l2r_lab.bench_settings import BenchSettings
from l2r_lab.inference import ROUTERS, agrees, models, sizes
from l2r_lab.timing import Step


def run(settings: BenchSettings) -> Bench:
    """Forward, losses, backward, clipping and AdamW; tokens per second."""
    bench = Bench(
        "step",
        settings,
        note="ratio: tokens/s over those of the stock model in a plain loop. Trainer: "
        "training_step, clipping and optimizer of transformers' Trainer.",
    )
    size = "tiny" if settings.quick else "small"
    batch, length = (8, 1024) if settings.device == "cuda" else (4, 256)
    if settings.quick:
        batch, length = 2, 32
    generator = torch.Generator().manual_seed(0)
    shape = (batch, length)
    batches = [
        torch.randint(2, sizes(settings, size)["vocab_size"], shape, generator=generator).to(
            settings.device
        )
        for _ in range(4)
    ]
    shared = models(settings, size)  # a model trains a copy of the shared weights
    by_name = {name: copy.deepcopy(model) for name, model in shared.items()}
    with torch.no_grad():
        expected = by_name["stock"](batches[0][:1, :32]).logits
        right = agrees(by_name["Linear"](batches[0][:1, :32]).logits, expected, settings)
    steps: dict[str, Step] = {"stock, plain loop": _stock_step(by_name["stock"], batches)}
    steps["stock, Trainer"] = _trainer_step(by_name["stock"], batches, settings)
    for name in ROUTERS:
        if right:  # ours with the stock weights must be the stock model
            steps[name] = _our_step(by_name[name], batches)
    times = bench.measure(steps, "step", share=2, rounds=5)
    tokens = batch * length
    base = times["stock, plain loop"]
    for name, time in times.items():
        bench.add(
            contender=name,
            tokens=tokens,
            tokens_per_second=tokens / time.median,
            low=tokens / max(time.turns),
            high=tokens / min(time.turns),
            step_ms=1e3 * time.median,
            **base.over(time),
        )
    return bench


def _stock_step(model: nn.Module, batches: list[Tensor]) -> Step:
    """Step that a user writes first: the model's own losses, clipping, torch's AdamW."""

    def backward(batch: Tensor) -> None:
        model(input_ids=batch, labels=batch, output_router_logits=True).loss.backward()

    return _step(model, batches, backward, torch.optim.AdamW(model.parameters(), lr=1e-5))


def _trainer_step(model: Any, batches: list[Tensor], settings: BenchSettings) -> Step:
    """Return the pieces that Trainer runs for every batch, without its data loading and logging."""
    import tempfile

    from l2r.hf.models import stock_trainer

    model.config.output_router_logits = True
    trainer = stock_trainer(model, tempfile.mkdtemp(), cpu=settings.device == "cpu")
    trainer.current_gradient_accumulation_steps = 1  # set by train(), which we do not run

    def backward(batch: Tensor) -> None:
        trainer.training_step(model, {"input_ids": batch, "labels": batch})

    return _step(model, batches, backward, trainer.create_optimizer())


def _our_step(model: Any, batches: list[Tensor]) -> Step:
    """Our loop: losses from the captured routers, fused AdamW."""

    def backward(batch: Tensor) -> None:
        with capture(model) as routed:
            task = model(input_ids=batch, labels=batch).loss
        logits, indices = routed.logits(), routed.indices()
        loss = task + 0.01 * load_balancing_loss(logits, indices) + 0.001 * router_z_loss(logits)
        torch.autograd.backward(loss)

    return _step(
        model, batches, backward, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    )


def _step(
    model: nn.Module,
    batches: list[Tensor],
    backward: Callable[[Tensor], None],
    optimizer: torch.optim.Optimizer,
) -> Step:
    def step(number: int) -> None:
        backward(batches[number % len(batches)])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    raise SystemExit(main("step", run))
