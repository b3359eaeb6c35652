"""``l2r plan``: memory, FLOPs, communication and hours of a recipe, before GPUs are paid for."""

from typing import Annotated, Any

import typer

from l2r.cli.options import AsJson, Changes, Recipe, tokens_option
from l2r.cli.output import echo, say
from l2r.files.atomic import plain_json


def plan(
    recipe: Recipe,
    changes: Changes = None,
    gpus: Annotated[int, typer.Option(help="Number of GPUs.", min=1)] = 8,
    gpu: Annotated[str, typer.Option(help="a100, h100, h200, b200 or mi300x.")] = "h100",
    parallel: Annotated[
        str | None, typer.Option(help="ddp, fsdp2 or ep; the fastest that fits by default.")
    ] = None,
    tokens: Annotated[str | None, tokens_option("of a run (default: the recipe's)")] = None,
    utilization: Annotated[
        float, typer.Option(help="Share of the GPU's stated arithmetic that a step reaches.")
    ] = 0.3,
    imbalance: Annotated[
        float, typer.Option(help="Tokens on the most loaded GPU over their mean (ep).")
    ] = 1.25,
    simulate: Annotated[
        bool, typer.Option(help="Simulate the peaks; without, they are by formula alone.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Plan a run on GPUs: memory, communication, FLOPs, hours, the largest micro_batch.

    Example: l2r plan olmoe-1b-7b/l2r-sips --gpus 8 --gpu b200
    """
    from l2r.files.wording import parse_tokens
    from l2r_lab.planning import Assumptions, check_form, find_gpu
    from l2r_lab.training.recipes import load_recipe

    assumptions = Assumptions(find_gpu(gpu), utilization, imbalance)
    check_form(parallel)
    length = None if tokens is None else parse_tokens(tokens)
    chosen_recipe = load_recipe(recipe, changes or ())
    say(f"{recipe} on {gpus} {gpu}, steps of {chosen_recipe.training.global_batch}: counting")
    from rich.console import Console

    from l2r.cli.console import print_table, print_text
    from l2r_lab.planning import make_plan, plan_records, planned_steps
    from l2r_lab.report.planning import flops_table, memory_table, scale_table
    from l2r_lab.training import with_pixels

    loaded = with_pixels(chosen_recipe)

    def by_formula(sizes: Any, best: Any) -> None:
        steps = planned_steps(loaded, sizes, length)
        hours = "" if steps is None else f", {steps * best.step.seconds / 3600:.1f} hours"
        say(
            f"by formula {best.cut.parallel}, micro_batch {best.cut.micro_batch}: "
            f"{best.peak / 1e9:.1f} GB per GPU{hours}{'; simulating the peaks' * simulate}"
        )

    with Console(stderr=True).status("counting") as status:
        chosen = make_plan(
            loaded,
            gpus,
            assumptions,
            parallel=parallel,
            simulated=simulate,
            report=lambda line: status.update(f"simulating {line}"),
            begin=by_formula,
        )
    records = plan_records(chosen, loaded, length)
    if as_json:
        echo(plain_json(records))
        return
    for table in (memory_table(records), flops_table(records), scale_table(records)):
        print_table(table)
    print_text(f"{records['reason']}.")
