"""Choose a parallel form and a micro-batch: what fits by the simulation, the fastest of it."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from l2r.errors import InputError
from l2r_lab.planning.cut import FORMS, Assumptions, Gpu, StepCut
from l2r_lab.planning.formula import Memory, StepTime, formula, step_time, training_flops
from l2r_lab.planning.simulate import Simulated, simulate
from l2r_lab.planning.sizes import ModelSizes, images_per_epoch, read_sizes
from l2r_lab.training.recipes import AnyRecipe, VisionRecipe

Report = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """One way to run; ``simulated`` is None where the formula stands alone."""

    cut: StepCut
    memory: Memory
    step: StepTime
    simulated: Simulated | None = None

    @property
    def peak(self) -> float:
        """Bytes on the fullest GPU, simulated if they were."""
        return self.memory.peak if self.simulated is None else self.simulated.peak


@dataclass(frozen=True)
class RunPlan:
    """``best`` at the GPUs asked for; ``forms``: the best of each form there, and one that fits
    nowhere at its smallest; ``above``: the next larger micro-batch of the best, None if there is
    none; ``scale``: the best of each form at several numbers of GPUs.
    """

    sizes: ModelSizes
    given: Assumptions
    best: Candidate
    forms: list[Candidate]
    above: Candidate | None
    scale: list[Candidate]
    reason: str

    def fits(self, candidate: Candidate) -> bool:
        """Tell whether its peak is within the GPU's usable memory."""
        return candidate.peak <= self.given.gpu.usable


def make_plan(
    recipe: AnyRecipe,
    gpus: int,
    given: Assumptions,
    *,
    parallel: str | None = None,
    scale: tuple[int, ...] = (8, 64, 512),
    simulated: bool = True,
    report: Report = lambda line: None,
    begin: Callable[[ModelSizes, Candidate], None] = lambda sizes, candidate: None,
) -> RunPlan:
    """Choose for a recipe. ``parallel`` asks for one form.

    ``begin`` gets the choice by formula alone, before the simulations; ``report`` a line for each.

    Raises ValueError, in one line, for what does not fit or cannot be cut.
    """
    every = FORMS if recipe.task == "language" else FORMS[:2]
    names = every if gpus > 1 else FORMS[:1]
    if parallel is not None and parallel not in names:
        where = f"for {recipe.task} on {gpus} GPUs" if gpus > 1 else "on one GPU"
        raise InputError(f"parallel must be one of {', '.join(names)} {where}; got {parallel!r}")
    StepCut(names[0], gpus, recipe.training.global_batch, 1, checkpointing=False)  # or says why not
    planner = _Planner(recipe, given, report if simulated else None)
    counted = [planner.best(n, gpus, simulated=False) for n in names if parallel in (None, n)]
    within = [c for c in counted if c.peak <= given.gpu.usable]
    begin(planner.sizes, min(within or counted, key=_rank))
    # Of a form that was not asked for, the formula is enough.
    forms = [planner.best(n, gpus, simulated=parallel in (None, n)) for n in names]
    fitting = [c for c in forms if c.peak <= given.gpu.usable]
    asked = [c for c in fitting if parallel in (None, c.cut.parallel)]
    if not asked:
        least = min((c for c in forms if parallel in (None, c.cut.parallel)), key=lambda c: c.peak)
        raise InputError(_does_not_fit(least, fitting, given.gpu))
    best = min(asked, key=_rank)
    return RunPlan(
        sizes=planner.sizes,
        given=given,
        best=best,
        forms=forms,
        above=planner.above(best.cut),
        scale=[
            forms[names.index(name)]
            if count == gpus
            else planner.best(name, count, simulated=False)
            for count in sorted({*scale, gpus})
            for name in (names if count == gpus else every)
            if planner.micro_batches(count)
        ],
        reason=_reason(best, fitting),
    )


class _Planner:
    """A recipe's sizes, and candidates made of them."""

    def __init__(self, recipe: AnyRecipe, given: Assumptions, report: Report | None) -> None:
        self.recipe, self.given, self.report = recipe, given, report
        self.sizes = read_sizes(recipe)

    def micro_batches(self, gpus: int) -> list[int]:
        """Divisors of the share of one GPU, ascending; none where the step does not divide."""
        batch = self.recipe.training.global_batch
        if batch % gpus:
            return []
        even = False
        if isinstance(self.recipe, VisionRecipe):  # mixing pairs images
            mixing = self.recipe.data.augmentation
            even = mixing.mixup > 0 or mixing.cutmix > 0
        share = batch // gpus
        return [n for n in range(1, share + 1) if share % n == 0 and not (even and n % 2)]

    def candidate(self, cut: StepCut) -> Candidate:
        step = step_time(self.sizes, cut, self.given.gpu, self.given.utilization)
        return Candidate(cut, formula(self.sizes, cut), step)

    def best(self, parallel: str, gpus: int, *, simulated: bool) -> Candidate:
        """Find the fastest that fits, or the smallest of all: by formula, then by simulation."""
        batch, imbalance = self.recipe.training.global_batch, self.given.imbalance
        every = [
            self.candidate(StepCut(parallel, gpus, batch, size, checkpointing, imbalance))
            for size in self.micro_batches(gpus)
            for checkpointing in (False, True)
        ]
        if not every:
            raise InputError(
                f"global_batch / gpus must be even with mixup or cutmix; got {batch} / {gpus}"
            )
        usable = self.given.gpu.usable
        fitting = sorted((c for c in every if c.peak <= usable), key=_rank)
        for option in fitting or [min(every, key=lambda c: c.peak)]:
            chosen = self.simulated(option) if simulated else option
            if chosen.peak <= usable:
                break
        return chosen

    def above(self, cut: StepCut) -> Candidate | None:
        """Return the next larger micro-batch, simulated."""
        larger = [size for size in self.micro_batches(cut.gpus) if size > cut.micro_batch]
        if not larger:
            return None
        return self.simulated(self.candidate(replace(cut, micro_batch=larger[0])))

    def simulated(self, candidate: Candidate) -> Candidate:
        if self.report is None:
            return candidate
        cut = candidate.cut
        checkpointing = ", checkpointing" if cut.checkpointing else ""
        self.report(f"{cut.parallel}, micro_batch {cut.micro_batch}{checkpointing}")
        return replace(candidate, simulated=simulate(self.recipe, cut))


def _rank(candidate: Candidate) -> tuple[float, int]:
    """Fastest first, to a per cent; then the largest micro-batch."""
    return round(math.log(candidate.step.seconds) / 0.01), -candidate.cut.micro_batch


def _reason(best: Candidate, fitting: list[Candidate]) -> str:
    cut, step = best.cut, best.step
    if cut.gpus == 1:
        return "one GPU: nothing to split"
    travels = {
        "ddp": "everything fits on each GPU, and gradients alone travel, once a step",
        "fsdp2": f"weights and optimizer are split; weights are gathered {cut.parts} times a step",
        "ep": "experts are split over a node, so that their gradients and states are; tokens "
        "travel instead (an engine with expert parallelism is needed: l2r train has ddp and fsdp2)",
    }[cut.parallel]
    others = [
        f"{c.cut.parallel} takes {100 * (c.step.seconds / step.seconds - 1):+.0f}% time"
        + (" with smaller micro-batches" if c.cut.micro_batch < cut.micro_batch else "")
        for c in fitting
        if c.cut.parallel != cut.parallel
    ]
    return f"{cut.parallel}: {travels}; {'; '.join(others) or 'no other form fits'}"


def _does_not_fit(least: Candidate, fitting: list[Candidate], gpu: Gpu) -> str:
    cut = least.cut
    instead = ", ".join(c.cut.parallel for c in fitting)
    advice = f"use --parallel {instead}" if instead else "use more GPUs or larger ones"
    return (
        f"does not fit: {cut.parallel} on {cut.gpus} GPUs takes {least.peak / 1e9:.1f} GB at "
        f"micro_batch {cut.micro_batch}{' with checkpointing' if cut.checkpointing else ''}, "
        f"{gpu.name} has {gpu.usable / 1e9:.1f} of {gpu.memory / 1e9:.0f} GB for tensors; {advice}"
    )


def planned_steps(recipe: AnyRecipe, sizes: ModelSizes, tokens: int | None = None) -> int | None:
    """Count the steps of a run of ``tokens``, by default the recipe's; None without its data.

    Tokens that are not here have no known length of an epoch; images are counted, and where they
    are not here, ImageNet's have a known number.
    """
    training = recipe.training
    wanted = tokens or training.tokens
    if wanted:
        return max(1, round(wanted / (training.global_batch * sizes.tokens)))
    if training.epochs is None or not isinstance(recipe, VisionRecipe):
        return training.steps
    items = images_per_epoch(recipe)
    return items and max(1, round(training.epochs * (items // training.global_batch)))


def plan_records(plan: RunPlan, recipe: AnyRecipe, tokens: int | None) -> dict[str, Any]:
    """Everything that is printed. ``tokens``: length of the run, None for the recipe's own."""
    sizes, best = plan.sizes, plan.best
    units = best.cut.global_batch * sizes.tokens
    steps = planned_steps(recipe, sizes, tokens)
    trained = training_flops(sizes, best.cut)

    def record(candidate: Candidate) -> dict[str, Any]:
        cut, step, simulated = candidate.cut, candidate.step, candidate.simulated
        fits = plan.fits(candidate)
        recomputed = formula(sizes, replace(cut, checkpointing=True))
        return {
            **asdict(cut),
            "parts": cut.parts,
            "fits": fits,
            "simulated": None if simulated is None else simulated.peak,
            "formula": candidate.memory.peak,
            "memory": asdict(candidate.memory),
            "with_checkpointing": {"activations": recomputed.activations, "peak": recomputed.peak},
            "step": asdict(step),
            "seconds": step.seconds,
            "bottleneck": step.bottleneck if fits else "memory",
            "tokens_per_second": units / step.seconds,
            "hours": None if steps is None else steps * step.seconds / 3600,
        }

    return {
        **asdict(plan.given),
        "usable": plan.given.gpu.usable,
        "steps": steps,
        "reason": plan.reason,
        "best": record(best),
        "forms": [record(candidate) for candidate in plan.forms],
        "above": plan.above and record(plan.above),
        "scale": [record(candidate) for candidate in plan.scale],
        "flops": [
            {
                "part": part,
                "forward_per_token": count / sizes.tokens,
                "step_per_gpu": trained[part] * best.cut.per_gpu,
                "share": trained[part] / sum(trained.values()),
            }
            for part, count in sizes.flops.items()
        ],
    }
