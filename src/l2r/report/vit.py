"""Sizes and operations of the vision model, a row per router."""

from collections.abc import Mapping

from l2r.report.tables import Table

# parameters, active parameters, router parameters, flops, router flops of one image
Counts = tuple[int, int, int, int, int]


def cost_table(counts: Mapping[str, Counts]) -> Table:
    """Counts of each router's model as a table; operations in units of 10^9 and 10^6."""
    rows = tuple(
        (name, total, active, router, flops / 1e9, router_flops / 1e6)
        for name, (total, active, router, flops, router_flops) in counts.items()
    )
    return Table(
        "ViT with experts: parameters, and operations per image",
        ("router", "parameters", "active", "in routers", "GFLOPs", "router MFLOPs"),
        rows,
        caption=(
            "Active: what one token meets, k of N experts. Operations: matrix products of one "
            "forward pass, a multiply-add counted as two."
        ),
        digits=3,
    )
