"""One step of training: gradients of all micro-batches, clipped, and AdamW.

Nothing in a step waits for the device unless its numbers are asked for. A gradient that is not
finite sets a flag there, with which AdamW leaves weights and slots as they are from then on.
``check`` reads it when numbers are read anyway, and takes that step again, with what it drew at
random, to say what went wrong.
"""

from typing import Any

import torch
from torch import Tensor, nn

from l2r.routers import capture, constrain
from l2r_lab.training.average import WeightAverage
from l2r_lab.training.bias_balance import BiasBalance
from l2r_lab.training.health import NonFiniteError, explain_gradient, explain_loss
from l2r_lab.training.monitor import MeanLoss
from l2r_lab.training.objective import (
    Loads,
    add_loads,
    auxiliary_losses,
    expert_loads,
    layer_usage,
    routing_summary,
)
from l2r_lab.training.parallel import (
    RandomState,
    accumulate,
    autocast_to,
    random_state,
    same_draws,
    set_random_state,
    unchanged_buffers,
)
from l2r_lab.training.ranks import Ranks
from l2r_lab.training.recipes import AnyRecipe
from l2r_lab.training.task import Batch, Task


class TrainingStep:
    """Steps of one run on one rank: L = L_task + lambda_bal L_bal + lambda_z L_z (Eq. 14)."""

    def __init__(
        self,
        recipe: AnyRecipe,
        task: Task,
        model: nn.Module,
        optimizer: torch.optim.AdamW,
        ranks: Ranks,
    ) -> None:
        self.recipe, self.task, self.ranks = recipe, task, ranks
        self.model, self.optimizer = model, optimizer
        decay, speed = recipe.training.ema_decay, recipe.losses.bias_speed
        self.bias_balance = BiasBalance(model, speed) if speed else None
        self.average = WeightAverage(model, decay) if decay else None
        self.mean_loss = MeanLoss(ranks)
        self._first_bad = torch.full((), -1, device=ranks.device)  # number of a step
        # Random state before a step, where it had changed; since the last check.
        self._random: dict[int, RandomState] = {}

    def take(self, step: int, rate: float, *, summarize: bool) -> dict[str, Any]:
        """One optimizer step at a learning rate; its losses and routing numbers, if asked."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)  # older checkpoints have none
        self._keep_random_state(step)
        totals, summary = self._gradients(step, summarize=summarize)
        self.mean_loss.add(totals["ce"])
        norm = self._clip()
        bad = (self._first_bad < 0) & ~torch.isfinite(norm)
        self._first_bad = torch.where(bad, step, self._first_bad)
        halted = self._first_bad >= 0
        self.optimizer.found_inf = halted.float()  # type: ignore[attr-defined]
        self.optimizer.step()
        constrain(self.model)
        if self.bias_balance is not None:
            self.bias_balance.step(self.ranks, halted)
        if self.average is not None:
            self.average.update(self.model, step)
        if not summarize:
            return {}
        means = {n: float(self.ranks.sum(v) / self.ranks.world) for n, v in totals.items()}
        return {**means, "lr": rate, "grad_norm": float(norm), **summary}

    def check(self) -> None:
        """Raise NonFiniteError if some step had a loss or gradient that is not finite.

        Its weights and biases are still there: it is computed again and names the layer and the
        cause. All ranks call this together.
        """
        step = int(self._first_bad)
        if step < 0:
            self._random.clear()
            return
        set_random_state(self._random[max(n for n in self._random if n <= step)], self.ranks.device)
        self._gradients(step, explain=True)
        norm = float(self._clip())
        raise NonFiniteError(explain_gradient(self.model, step, norm, self.ranks))

    def _keep_random_state(self, step: int) -> None:
        state = random_state(self.ranks.device)
        if not self._random or state != next(reversed(self._random.values())):
            self._random[step] = state

    def _gradients(
        self, step: int, *, summarize: bool = False, explain: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Gradients of the step's global batch; mean losses, and routing numbers if asked."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        batches = self.task.micro_batches(step, self.ranks)
        usage = self._usage_of_step(batches)
        totals: dict[str, Tensor] = {}
        total_loads: Loads = {}
        for number, batch in enumerate(batches):
            last = number + 1 == len(batches)
            if explain:
                self._explain_loss(step, batch, usage)
            with accumulate(self.model, last=last):
                loss, losses, loads = self._loss(batch, usage)
                # A loss that is not finite must leave a gradient that no rank takes for one.
                finite = torch.where(torch.isfinite(loss.detach()), 1.0, float("nan"))
                (loss / len(batches) * finite).backward()  # type: ignore[no-untyped-call]
            if summarize:
                total_loads = add_loads(total_loads, loads)
            for name, value in losses.items():
                totals[name] = totals.get(name, torch.zeros_like(value)) + value / len(batches)
        return totals, routing_summary(self._loads_over_ranks(total_loads))

    def _loss(
        self, batch: Batch, usage: list[Tensor] | None
    ) -> tuple[Tensor, dict[str, Tensor], Loads]:
        """Return the objective of a micro-batch, its parts, and the loads of the experts."""
        section = self.recipe.losses
        with autocast_to(self.recipe.training.precision, self.ranks.device):
            with capture(self.model) as captured:
                task_loss = self._task_loss(batch)
            loads = expert_loads(captured)
            if usage is None:
                usage = layer_usage(captured, section, loads)
                usage = self._over_ranks(usage) if section.balance_scope == "step" else usage
            extra, parts_of_extra = auxiliary_losses(captured, section, usage=usage)
            loss = task_loss + extra
            if self.bias_balance is not None:
                self.bias_balance.add(captured)
        return loss, {"ce": task_loss.detach(), **parts_of_extra}, loads

    def _explain_loss(self, step: int, batch: Batch, usage: list[Tensor] | None) -> None:
        """Raise NonFiniteError, on every rank, where the loss of a rank is not finite.

        The ranks look first and go back after that: one that left the others in their backward
        would be waited for.
        """
        with same_draws(self.ranks.device), unchanged_buffers(self.model):
            cause = explain_loss(self.model, lambda: self._loss(batch, usage)[0], step, self.ranks)
        if cause is not None:
            raise NonFiniteError(cause)

    def _task_loss(self, batch: Batch) -> Tensor:
        return self.task.loss(self.model, batch, self.recipe.training.loss_chunk)

    def _usage_of_step(self, batches: list[Batch]) -> list[Tensor] | None:
        """f_i over all micro-batches of the step, which only a forward before them can give.

        That forward draws the dropout and the noise that those draw which follow it.
        """
        if self.recipe.losses.balance_scope != "step" or len(batches) == 1:
            return None
        sums: list[Tensor] = []
        with torch.no_grad(), unchanged_buffers(self.model), same_draws(self.ranks.device):
            for batch in batches:
                autocast = autocast_to(self.recipe.training.precision, self.ranks.device)
                with autocast, capture(self.model) as captured:
                    self._task_loss(batch)
                parts = layer_usage(captured, self.recipe.losses, expert_loads(captured))
                sums = [a + b for a, b in zip(sums, parts, strict=True)] if sums else parts
        return self._over_ranks([total / len(batches) for total in sums])

    def _loads_over_ranks(self, loads: Loads) -> Loads:
        return {name: [self.ranks.sum(load) for load in calls] for name, calls in loads.items()}

    def _over_ranks(self, usage: list[Tensor]) -> list[Tensor]:
        return [self.ranks.sum(part) / self.ranks.world for part in usage]

    def _clip(self) -> Tensor:
        """Clip the gradient; its norm over all ranks, before."""
        limit = self.recipe.training.clip_norm
        norm: Any = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
