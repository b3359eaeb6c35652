"""``l2r params``: router parameters and cost as the paper counts them."""

from typing import Annotated

import typer

from l2r.cli.options import AsJson
from l2r.errors import InputError

_MOST = 2**48  # entries of a tensor; torch counts bytes in 63 bits
_ACROSS = 5  # numbers of heads side by side on a terminal


def params(
    hidden_size: Annotated[int, typer.Option(help="Hidden size d.", min=1)] = 2048,
    num_experts: Annotated[int, typer.Option(help="Experts N.", min=1)] = 64,
    num_layers: Annotated[int, typer.Option(help="MoE layers.", min=1)] = 16,
    ranks: Annotated[str, typer.Option(help="Comma-separated ranks r.")] = "2,4,8,16,32",
    heads: Annotated[str, typer.Option(help="Comma-separated heads H.")] = "1,2,4,8,16",
    vit: Annotated[
        bool, typer.Option("--vit", help="The paper's whole ViT-S instead, every router.")
    ] = False,
    recipes: Annotated[
        str | None,
        typer.Option(
            help="Packaged folder of recipes, e.g. olmoe-1b-7b: count its whole models instead."
        ),
    ] = None,
    cost: Annotated[
        bool, typer.Option("--cost", help="Multiply-adds of one token instead of parameters.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Router parameters (or cost) for ranks and heads, over all layers, against the linear router.

    The table of the paper's Appendix D, or the cost by its formulas.

    Example: l2r params --hidden-size 4096 --num-experts 128 --num-layers 32
    """
    if cost and (vit or recipes is not None):
        raise InputError("cost must be given without vit and recipes; --vit prints operations too")
    rank_list, head_list = _positive("ranks", ranks), _positive("heads", heads)
    rank, head = max(rank_list), max(head_list)
    entries = max(num_experts * hidden_size, num_experts * rank * head, rank * hidden_size)
    if entries > _MOST:
        raise InputError(
            "num_experts x hidden_size, num_experts x rank x heads and rank x hidden_size must be "
            f"at most {_MOST:,}; got {entries:,}"
        )
    if recipes is not None:
        from l2r_lab.training.recipes import recipes_in

        recipes_in(recipes)  # or says which there are
    from l2r.cli.console import print_table
    from l2r.routers.count import router_cost, router_parameters
    from l2r_lab.planning import recipe_sizes
    from l2r_lab.report.paper_tables import parameter_table, size_table, vit_cost_table

    if vit:
        from l2r.hf.models import vit_s_costs

        print_table(vit_cost_table(vit_s_costs()), as_json=as_json)
        return
    if recipes is not None:
        rows = {name: (kind, *size) for name, (kind, size) in recipe_sizes(recipes).items()}
        print_table(size_table(rows), as_json=as_json)
        return
    sizes = {"hidden_size": hidden_size, "num_experts": num_experts}
    count = router_cost if cost else router_parameters
    linear = num_layers * count("linear", **sizes)
    cells = {
        (rank, head): num_layers * count("l2r_sips", **sizes, rank=rank, heads=head)
        for rank in rank_list
        for head in head_list
    }
    if as_json:
        print_table(parameter_table(cells, linear, cost=cost), as_json=True)
        return
    for start in range(0, len(head_list), _ACROSS):
        shown = head_list[start : start + _ACROSS]
        part = {at: count for at, count in cells.items() if at[1] in shown}
        print_table(parameter_table(part, linear, cost=cost))


def _positive(name: str, text: str) -> list[int]:
    values = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(values) < 1:
        raise InputError(f"{name} must be positive integers separated by commas; got {text!r}")
    return values
