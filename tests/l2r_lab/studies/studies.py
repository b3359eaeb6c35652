"""A small plan, and results made up for it."""

from l2r.machine import describe_machine
from l2r_lab.files.study import MEASURES, CellResult
from l2r_lab.studies.registration import RegisteredPlan

SMALL = {
    "title": "Small",
    "question": "Is L2R better?",
    "recipe": "demo/linear",
    "tokens": 2048,
    "sample": 1024,
    "seeds": {"least": 2, "most": 2},
    "margins": {"validation_ce": 0.02},
    "sd": 0.02,
    "arms": {"linear": [], "l2r": ["router.kind=l2r_sips", "router.heads=2"]},
    "contrasts": [
        {"first": "l2r", "second": "linear", "metric": "validation_ce", "primary": True},
        {"first": "l2r", "second": "linear", "metric": "routing_gain", "better": "larger"},
    ],
}


def made_up(plan: RegisteredPlan, seeds: int, value, *, seconds: float = 10.0) -> list[CellResult]:
    """A result of every cell; ``value(arm, seed, metric, trained)`` gives the measures."""
    facts = {"seconds": seconds, **describe_machine()}
    return [
        CellResult(
            cell.arm,
            cell.recipe.seed,
            *(
                {m: value(cell.arm, cell.recipe.seed, m, trained) for m in MEASURES}
                for trained in (True, False)
            ),
            [(10, 6.0), (20, 5.0 + 0.01 * cell.recipe.seed)],
            cell.recipe.model_dump(mode="json"),
            plan.mark(),
            facts,
        )
        for cell in plan.plan.cells(seeds)
    ]
