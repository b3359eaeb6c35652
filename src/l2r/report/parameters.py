"""The router-parameter table in the paper's layout."""

from collections.abc import Mapping

from l2r.report.tables import Table


def parameter_table(cells: Mapping[tuple[int, int], int], linear: int) -> Table:
    """Ranks down, heads across; parameters and their share of the linear router's."""
    ranks = sorted({rank for rank, _ in cells})
    heads = sorted({head for _, head in cells})
    rows = tuple(
        (rank, *(show_count(cells[rank, head], linear) for head in heads)) for rank in ranks
    )
    columns = ("rank r \\ heads H", *(str(head) for head in heads))
    caption = f"All layers; in parentheses the share of the linear router's {linear:,}."
    return Table("Router parameters", columns, rows, caption=caption)


def size_table(sizes: Mapping[str, tuple[str, int, int, int, int]]) -> Table:
    """A row per recipe: router, all parameters, active ones, routers' and linear routers'."""
    rows = tuple(
        (name, router, total, active, show_count(own, linear))
        for name, (router, total, active, own, linear) in sizes.items()
    )
    return Table(
        "Models of the recipes",
        ("recipe", "router", "parameters", "active", "in routers"),
        rows,
        caption=(
            "Active: what one token meets, k of N experts, embeddings included. In parentheses "
            "the routers' share of what linear routers would have."
        ),
    )


def show_count(count: int, linear: int) -> str:
    """``131.072K (6.25%)`` below a million, ``1.114M (53.11%)`` above.

    Digits are rounded half to even on the exact decimal, as the paper's cells are.
    """
    share = f"({100 * count / linear:.2f}%)"
    if count >= 1_000_000:
        return f"{count / 1e6:.3f}M {share}"
    return f"{count / 1e3:.3f}K {share}"
