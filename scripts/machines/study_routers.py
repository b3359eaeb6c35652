"""Router time at the sizes of the evidence: each arm of the studies over its linear router.

    python -m scripts.machines.study_routers > results/router-time.md

A router's forward and backward of one training step's tokens, alone, as the plan builds it. All
arms of a study take turns; processor time of one thread, seven turns.
"""

import torch

from l2r.cost.benchmarks.contenders import training_step
from l2r.cost.benchmarks.results import environment
from l2r.cost.benchmarks.timing import measure
from l2r.routers import build_router
from l2r.studies.registration import read_plan
from l2r.training.recipes.schema import LanguageRecipe

# plan -> the linear arm that its ratios are over: tuned where the plan has one
STUDIES = {
    "decision": "linear-best",
    "experts-64": "linear-best",
    "ranked-64": "linear",
    "experts-256": "linear",
    "rank-8-of-256": "linear",
    "experts-1024": "linear",
}
SECONDS = 4.0  # for all arms of a study, as in l2r bench


def main() -> None:
    """Print a table with a row per study and arm."""
    torch.set_num_threads(1)
    machine = environment()
    print(
        f"Router alone, forward and backward; {machine['processor']}, one thread, processor time, "
        f"ours in {machine['cpu_routers']}.\n"
    )
    print("| study | experts, chosen | arm | router parameters | us | over linear, range |")
    print("|---|---|---|---|---|---|")
    for name, linear in STUDIES.items():
        steps, parameters = {}, {}
        for cell in read_plan(name).plan.cells(1):
            recipe = cell.recipe
            assert isinstance(recipe, LanguageRecipe)
            sizes = recipe.model
            router = build_router(
                recipe.router,
                hidden_size=sizes.hidden_size,
                num_experts=sizes.num_experts,
                top_k=sizes.num_experts_per_tok,
            ).train()
            torch.manual_seed(0)
            tokens = recipe.training.global_batch * recipe.data.sequence_length
            inputs = [torch.randn(tokens, sizes.hidden_size) for _ in range(2)]
            steps[cell.arm] = training_step(router, list(router.parameters()), inputs)
            parameters[cell.arm] = sum(p.numel() for p in router.parameters())
        times = measure(steps, device="cpu", seconds=SECONDS, rounds=7, kind="cpu")
        base = times[linear].turns
        for arm, timing in times.items():
            ratios = sorted(t / b for t, b in zip(timing.turns, base, strict=True))
            print(
                f"| {name} | {sizes.num_experts}, {sizes.num_experts_per_tok} | {arm} "
                f"| {sizes.num_hidden_layers} x {parameters[arm]:,} | {1e6 * timing.median:,.0f} "
                f"| {ratios[len(ratios) // 2]:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
            )


if __name__ == "__main__":
    main()
