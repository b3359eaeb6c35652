"""A plan as plain values, which tables, JSON and pages read."""

from typing import Any

from l2r.planning.choose import Candidate, Plan
from l2r.planning.cost import training_flops
from l2r.recipes.load import AnyRecipe


def plan_records(plan: Plan, recipe: AnyRecipe, tokens: int | None) -> dict[str, Any]:
    """Everything that is printed. ``tokens``: length of the run, None for the recipe's own."""
    steps = run_steps(recipe, plan.sizes.tokens, tokens)
    gpu, best = plan.given.gpu, plan.best
    per_token = {p: n / plan.sizes.tokens for p, n in plan.sizes.flops.items()}
    trained = training_flops(plan.sizes, checkpointing=best.cut.checkpointing)
    return {
        "gpu": gpu.name,
        "gpu_memory": gpu.memory,
        "usable_memory": gpu.usable,
        "source": gpu.source,
        "utilization": plan.given.utilization,
        "imbalance": plan.given.imbalance,
        "steps": steps,
        "reason": plan.reason,
        "best": _record(best, plan, steps),
        "forms": [_record(c, plan, steps) for c in plan.forms],
        "above": plan.above and _record(plan.above, plan, steps),
        "scale": [_record(c, plan, steps) for c in plan.scale],
        "flops": [
            {
                "part": part,
                "forward_per_token": per_token[part],
                "step_per_gpu": trained[part] * best.cut.per_gpu,
                "share": trained[part] / sum(trained.values()),
            }
            for part in per_token
        ],
    }


def run_steps(recipe: AnyRecipe, tokens_per_item: int, tokens: int | None) -> int | None:
    """Optimizer steps of a run; None where only the data knows how long an epoch is."""
    units = recipe.training.global_batch * tokens_per_item
    wanted = tokens or recipe.training.tokens
    if wanted:
        return max(1, round(wanted / units))
    return recipe.training.steps


def _record(candidate: Candidate, plan: Plan, steps: int | None) -> dict[str, Any]:
    cut, memory, step = candidate.cut, candidate.memory, candidate.step
    tokens = cut.global_batch * plan.sizes.tokens
    simulated = candidate.simulated
    return {
        "parallel": cut.parallel,
        "gpus": cut.gpus,
        "micro_batch": cut.micro_batch,
        "parts": cut.parts,
        "checkpointing": cut.checkpointing,
        "fits": plan.fits(candidate),
        "simulated": None if simulated is None else simulated.peak,
        "formula": memory.peak,
        **{name: getattr(memory, name) for name in _PARTS},
        "arithmetic_seconds": step.arithmetic,
        "gradients_seconds": step.gradients,
        "weights_seconds": step.weights,
        "tokens_seconds": step.tokens,
        "sent": step.bytes_sent,
        "step_seconds": step.seconds,
        "bottleneck": step.bottleneck if plan.fits(candidate) else "memory",
        "tokens_per_second": tokens / step.seconds,
        "hours": None if steps is None else steps * step.seconds / 3600,
    }


_PARTS = (
    "weights", "gradients", "optimizer", "buckets", "activations", "casts", "logits", "dispatch",
    "gathered",
)  # fmt: skip
