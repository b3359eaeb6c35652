"""A plan as plain values, which tables, JSON and pages read."""

from dataclasses import asdict, replace
from typing import Any

from l2r.cost.planning.choose import Candidate, Plan
from l2r.cost.planning.cost import training_flops
from l2r.cost.planning.peak_memory import formula
from l2r.training.recipes import AnyRecipe


def plan_records(plan: Plan, recipe: AnyRecipe, tokens: int | None) -> dict[str, Any]:
    """Everything that is printed. ``tokens``: length of the run, None for the recipe's own."""
    sizes, best = plan.sizes, plan.best
    units = best.cut.global_batch * sizes.tokens
    wanted = tokens or recipe.training.tokens
    # An epoch is as long as the data, which is not read: None.
    steps = max(1, round(wanted / units)) if wanted else recipe.training.steps
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
