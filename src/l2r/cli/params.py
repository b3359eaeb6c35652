"""``l2r params``: router parameters as the paper counts them."""

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        "params",
        epilog="Example: l2r params --hidden-size 4096 --num-experts 128 --layers 32",
        help="Router parameters for ranks and heads, over all layers, against the linear router.",
    )(params)


def params(
    hidden_size: Annotated[int, typer.Option(help="Hidden size d.")] = 2048,
    num_experts: Annotated[int, typer.Option(help="Experts N.")] = 64,
    layers: Annotated[int, typer.Option(help="MoE layers.")] = 16,
    ranks: Annotated[str, typer.Option(help="Comma-separated ranks r.")] = "2,4,8,16,32",
    heads: Annotated[str, typer.Option(help="Comma-separated heads H.")] = "1,2,4,8,16",
    json: Annotated[bool, typer.Option("--json", help="Print records as JSON.")] = False,
) -> None:
    """Print the router-parameter table (paper, Appendix D)."""
    from l2r.cli.console import print_table
    from l2r.report.parameters import parameter_table
    from l2r.routers.count import router_parameters

    sizes = {"hidden_size": hidden_size, "num_experts": num_experts}
    rank_list, head_list = numbers("ranks", ranks), numbers("heads", heads)
    linear = layers * router_parameters("linear", **sizes)
    cells = {
        (rank, head): layers * router_parameters("l2r_sips", **sizes, rank=rank, heads=head)
        for rank in rank_list
        for head in head_list
    }
    print_table(parameter_table(cells, linear), as_json=json)


def numbers(name: str, text: str) -> list[int]:
    """Positive integers from a comma-separated list. Raises ValueError naming the option."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise ValueError(f"{name} must be positive integers separated by commas; got {text!r}")
    return values
