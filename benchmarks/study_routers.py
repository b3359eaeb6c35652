"""Router time at the sizes of the evidence: each arm of the studies over its linear router.

    python -m benchmarks.study_routers > results/router-time.md

A router's forward and backward of one training step's tokens, alone, as the plan builds it, and a
whole training step of the plan's model: forward, losses, backward, clipping and AdamW. All arms of
a study take turns; processor time of one thread, seven turns.
"""

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.contenders import training_step
from l2r.functional import load_balancing_loss
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM, register_experts
from l2r.routers import build_router, capture
from l2r_lab.studies.registration import read_plan
from l2r_lab.timing import Step, Timing, environment, measure
from l2r_lab.training.recipes.schema import LanguageRecipe

# plan -> the linear arm that its ratios are over: tuned where the plan has one
STUDIES = {
    "decision": "linear-best",
    "width-256": "linear-best",
    "experts-64": "linear-best",
    "ranked-64": "linear",
    "experts-256": "linear",
    "rank-8-of-256": "linear",
    "rivals-256": "linear",
    "transfer": "linear",
    "experts-1024": "linear",
    "ranked-1024": "linear",
}
SECONDS = 4.0  # for all routers of a study, as in benchmarks/bench.py
WHOLE_SECONDS = 14.0  # for all whole steps of a study
WORDS = 4096  # of the corpus


def main() -> None:
    """Print a table with a row per study and arm."""
    torch.set_num_threads(1)
    machine = environment()
    print(
        f"Router alone, forward and backward, and a whole training step; {machine['processor']}, "
        f"one thread, processor time, ours in {machine['cpu_routers']}.\n"
    )
    print(
        "| study | experts, chosen | arm | router parameters | us | over linear, range "
        "| step, ms | step over linear, range |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, linear in STUDIES.items():
        cells = read_plan(name).plan.cells(1)
        recipes = {c.arm: c.recipe for c in cells if isinstance(c.recipe, LanguageRecipe)}
        routers = {arm: _router(recipe) for arm, recipe in recipes.items()}
        alone = _times({a: _router_step(r, recipes[a]) for a, r in routers.items()}, SECONDS)
        whole = _times({a: _whole_step(recipe) for a, recipe in recipes.items()}, WHOLE_SECONDS)
        for arm, router in routers.items():
            sizes = recipes[arm].model
            parameters = sum(p.numel() for p in router.parameters())
            print(
                f"| {name} | {sizes.num_experts}, {sizes.num_experts_per_tok} | {arm} "
                f"| {sizes.num_hidden_layers} x {parameters:,} "
                f"| {1e6 * alone[arm].median:,.0f} | {_over(alone[arm], alone[linear])} "
                f"| {1e3 * whole[arm].median:,.0f} | {_over(whole[arm], whole[linear])} |",
                flush=True,
            )


def _times(steps: dict[str, Step], seconds: float) -> dict[str, Timing]:
    return measure(steps, seconds=seconds, rounds=7, clock="cpu")


def _over(own: Timing, base: Timing) -> str:
    """Median ratio of the turns and its range."""
    ratios = sorted(t / b for t, b in zip(own.turns, base.turns, strict=True))
    return f"{ratios[len(ratios) // 2]:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def _router(recipe: LanguageRecipe) -> nn.Module:
    sizes = recipe.model
    return build_router(
        recipe.router,
        hidden_size=sizes.hidden_size,
        num_experts=sizes.num_experts,
        top_k=sizes.num_experts_per_tok,
    ).train()


def _router_step(router: nn.Module, recipe: LanguageRecipe) -> Step:
    torch.manual_seed(0)
    tokens = recipe.training.global_batch * recipe.data.sequence_length
    inputs = [torch.randn(tokens, recipe.model.hidden_size) for _ in range(2)]
    return training_step(router, list(router.parameters()), inputs)


def _whole_step(recipe: LanguageRecipe) -> Callable[[int], None]:
    torch.manual_seed(0)
    config = L2rOlmoeConfig(**recipe.model_options(WORDS), eos_token_id=0)
    model = L2rOlmoeForCausalLM(config).train()
    model.set_experts_implementation(register_experts())
    shape = (recipe.training.global_batch, recipe.data.sequence_length)
    batches = [torch.randint(WORDS, shape) for _ in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(number: int) -> None:
        batch = batches[number % len(batches)]
        with capture(model) as routed:
            loss = model(input_ids=batch, labels=batch).loss
        balance = load_balancing_loss(routed.logits(), routed.indices())
        (loss + recipe.losses.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.training.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
