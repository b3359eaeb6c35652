"""The training loop, for every task: read it top to bottom.

One step (step.py): micro-batches of this rank -> loss -> gradient, clipped -> AdamW. The data order
is a function of the step, so a run resumes to the same bits from weights, optimizer slots, random
state and one integer.
"""

from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from l2r.errors import InputError
from l2r.files.atomic import new_folder
from l2r.files.folder import RunFolder
from l2r.hf.checkpoints import write_run_card
from l2r.hf.models import checkpoint_activations
from l2r_lab.training.checkpoint import load_checkpoint, save_checkpoint
from l2r_lab.training.claim import (
    check_claim,
    claim_run,
    environment,
    resumed,
    size_note,
    stop_on_signals,
)
from l2r_lab.training.health import NonFiniteError
from l2r_lab.training.initial import build_model
from l2r_lab.training.kept_memory import keep_freed_memory
from l2r_lab.training.loggers import check_logger
from l2r_lab.training.monitor import Display, Monitor, Speed, progress_bar
from l2r_lab.training.optimizer import build_optimizer, learning_rate
from l2r_lab.training.parallel import (
    autocast_to,
    compile_blocks,
    gathered_weights,
    parallelize,
    whole_model,
)
from l2r_lab.training.ranks import Ranks, join_ranks
from l2r_lab.training.recipes import AnyRecipe
from l2r_lab.training.step import TrainingStep
from l2r_lab.training.task import Task, build_task


@dataclass(frozen=True)
class RunResult:
    """End of a run: ``finished`` is false when a signal stopped it early.

    signal: that came, also where it was too late to stop this run. first: whether this process is
    the one of its ranks that prints.
    """

    folder: Path
    step: int
    steps: int
    finished: bool
    signal: int | None = None
    first: bool = True


def train(
    recipe: AnyRecipe,
    folder: str | Path,
    *,
    label: str = "train",
    show_progress: bool = True,
    display: Display | None = None,
    report: Callable[[str], None] = lambda line: None,
    on_step: Callable[[int], None] = lambda step: None,
) -> RunResult:
    """Train a recipe into a run folder, resuming from its newest checkpoint if it has one.

    Under torchrun every rank calls this. ``display`` shows progress in place of a bar of its own.
    ``on_step`` gets the number of every step, from 0, before the step is taken; what it raises ends
    the run.

    Raises ValueError when the folder holds a run of another recipe or of text that has changed
    since, or is in use, NonFiniteError (a ValueError) at a NaN or infinity, OSError when the folder
    cannot be written, ModuleNotFoundError when the recipe's logger is not installed.
    """
    run = RunFolder(folder)
    check_logger(recipe.training.logger)
    with join_ranks() as ranks:
        if ranks.first:
            run.create()
        ranks.wait()
        lock = run.lock() if ranks.first else nullcontext()
        own = progress_bar(show=show_progress and ranks.first)
        with lock, nullcontext(display) if display else own as progress:
            task = build_task(resumed(run, recipe), report if ranks.first else _silent)
            task.report = report  # what one rank meets later, the others do not see
            trainer = _Trainer(task.recipe, run, task, ranks, on_step)
            if ranks.device.type == "cpu":
                keep_freed_memory()  # not before: a rank frees its initial weights as they leave
            if trainer.size_note and ranks.first:
                report(trainer.size_note)
            position = (task.unit, trainer.units_per_step)
            written = run if ranks.first else None
            with closing(Monitor(written, progress, label, trainer.steps, position)) as monitor:
                return trainer.fit(monitor)


def _silent(line: str) -> None:
    del line


class _Trainer:
    """State of one run on one rank."""

    def __init__(
        self,
        recipe: AnyRecipe,
        run: RunFolder,
        task: Task,
        ranks: Ranks,
        on_step: Callable[[int], None],
    ) -> None:
        self.recipe, self.run, self.task, self.ranks = recipe, run, task, ranks
        self.on_step = on_step
        training = recipe.training
        if training.global_batch % (training.micro_batch * ranks.world):
            raise InputError(
                f"global_batch must be a multiple of micro_batch * ranks; got "
                f"{training.global_batch}, {training.micro_batch} and {ranks.world}"
            )
        self.units_per_step = training.global_batch * task.item_size
        self.steps = _steps(recipe, task.items, self.units_per_step)
        self.end = self.steps * self.units_per_step
        check_claim(run, recipe, task)
        torch.manual_seed(recipe.seed)
        torch.use_deterministic_algorithms(training.deterministic)
        model, weights = build_model(task, training.parallel, ranks)
        if training.activation_checkpointing:
            checkpoint_activations(model)
        if training.compile:
            compile_blocks(model)
        facts = environment(model, recipe, task.describe(), ranks.world)
        self.size_note = size_note(facts)
        self.model = parallelize(model, training.parallel, ranks, weights)
        self.optimizer = build_optimizer(self.model, recipe.optimizer)
        self.step = TrainingStep(recipe, task, self.model, self.optimizer, ranks)
        claim_run(run, recipe, ranks, task)  # of settings that nothing above has refused
        if ranks.first:
            run.write_json(run.environment, {**facts, "steps": self.steps})
        self.average, self.mean_loss = self.step.average, self.step.mean_loss
        self.extra = self.average.tensors() if self.average else {}  # in every checkpoint

    def fit(self, monitor: Monitor) -> RunResult:
        if self.run.is_finished() and not self.run.complete_checkpoints():  # removed since
            return self._result(self.steps, finished=True, number=None)
        step = self._resume(monitor)
        every, keep = self.recipe.checkpoint.every, self.recipe.checkpoint.keep
        near = [count / self.units_per_step for count in self.recipe.checkpoint.keep_nearest]
        speed = Speed()
        with stop_on_signals() as stop:
            while step < self.steps:
                self.on_step(step)
                logged = (step + 1) % self.recipe.training.log_every == 0 or step + 1 == self.steps
                rate = learning_rate(self.recipe.optimizer, step * self.units_per_step, self.end)
                numbers = self.step.take(step, rate, summarize=logged)
                step += 1
                speed.add(self.units_per_step)
                validating = self._due(step, self.recipe.evaluation.every)
                if logged or validating:
                    self._check()
                if logged:
                    per_second = speed.read()
                    monitor.record("train", step, {**numbers, "per_second": per_second})
                    text = f"loss {numbers['ce']:.3f}  {per_second:,.0f} {self.task.unit}/s"
                    monitor.advance(step, text)
                if validating:
                    self._validate(step, monitor)
                    speed.read()
                stopping = self.ranks.any(bool(stop))
                saving = stopping or self._due(step, every)
                if saving:
                    self._check()
                if logged or saving:
                    # of all steps since the last such record, so that few records hold them all
                    monitor.record("train_mean", step, self.mean_loss.read())
                if saving:
                    state = (self.model, self.optimizer, self.ranks)
                    kept: Any = {"keep": keep, "near": near}
                    save_checkpoint(self.run, step, *state, **kept, extra=self.extra)
                    speed.read()
                if stopping and step < self.steps:
                    return self._result(step, finished=False, number=stop.signal)
        self._export()
        return self._result(step, finished=True, number=stop.signal)

    def _result(self, step: int, *, finished: bool, number: int | None) -> RunResult:
        return RunResult(self.run.path, step, self.steps, finished, number, self.ranks.first)

    def _due(self, step: int, every: int) -> bool:
        return step == self.steps or (every > 0 and step % every == 0)

    def _validate(self, step: int, monitor: Monitor) -> None:
        with torch.no_grad(), autocast_to(self.recipe.training.precision, self.ranks.device):
            numbers = self.task.validate(whole_model(self.model), self.ranks.device)
            if self.average is not None:
                with self.average.applied(self.model):
                    averaged = self.task.validate(whole_model(self.model), self.ranks.device)
                numbers |= {f"ema/{name}": value for name, value in averaged.items()}
            answers = self.task.downstream(whole_model(self.model))
        monitor.record("validation", step, numbers)
        monitor.record("tasks", step, answers)

    def _resume(self, monitor: Monitor) -> int:
        checkpoints = self.run.complete_checkpoints()
        step = 0
        if checkpoints:
            state = (self.model, self.optimizer, self.ranks)
            step = load_checkpoint(checkpoints[-1], *state, extra=self.extra)
        monitor.start(step, self.recipe.training.logger)
        return step

    def _export(self) -> None:
        """Hugging Face export of the final weights, and of their average if there is one."""
        self._export_weights(self.run.model)
        if self.average is not None:
            with self.average.applied(self.model):
                self._export_weights(self.run.averaged_model)

    def _export_weights(self, folder: Path) -> None:
        weights = gathered_weights(self.model)
        if self.ranks.first and not (folder / "config.json").is_file():
            with torch.device("meta") if self.task.draws_weights else nullcontext():
                model = self.task.build_model()
            model.load_state_dict(weights, assign=self.task.draws_weights)
            with new_folder(folder) as part:
                self.task.export(model, part)
            write_run_card(self.run, folder, model, averaged=folder == self.run.averaged_model)
        self.ranks.wait()

    def _check(self) -> None:
        """Raise NonFiniteError if a step was not taken for a NaN or an infinity."""
        try:
            self.step.check()
        except NonFiniteError as error:
            checkpoints = self.run.complete_checkpoints()
            last = f"; last good checkpoint: {checkpoints[-1]}" if checkpoints else ""
            raise NonFiniteError(f"{error}{last}") from None


def _steps(recipe: AnyRecipe, items: int, units_per_step: int) -> int:
    training = recipe.training
    if training.steps is not None:
        return training.steps
    if training.tokens is not None:
        return max(1, round(training.tokens / units_per_step))
    batch, epochs = training.global_batch, training.epochs or 0
    if items < batch:
        raise InputError(f"training.epochs needs global_batch <= {items}, all items; got {batch}")
    return max(1, round(epochs * (items // batch)))
