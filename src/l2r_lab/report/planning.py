"""Plans as tables: memory, FLOPs, time over numbers of GPUs."""

from collections.abc import Mapping
from typing import Any

from l2r.report.tables import Table
from l2r_lab.report.verdicts import of_plan

Record = Mapping[str, Any]
_MEMORY = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "buckets": "buckets",
    "gathered": "gathered",
    "activations": "activations",
    "casts": "bf16 copies",
    "logits": "logits",
    "dispatch": "of activations: dispatch",
}


def memory_table(plan: Record) -> Table:
    """List the best of each form, and the next larger micro-batch of the chosen one."""
    gpu = plan["gpu"]
    rows = [*plan["forms"], *([plan["above"]] if plan["above"] else [])]
    columns = ("GB per GPU", *(_name(row) for row in rows))
    body = [(title, *(row["memory"][key] / 1e9 for row in rows)) for key, title in _MEMORY.items()]
    for key in ("activations", "peak"):
        title = f"{key} with checkpointing"
        body.append((title, *(row["with_checkpointing"][key] / 1e9 for row in rows)))
    for key, title in (("formula", "peak by formula"), ("simulated", "peak simulated")):
        body.append((title, *(row[key] and row[key] / 1e9 for row in rows)))
    body.append(("fits", *(row["fits"] for row in rows)))
    caption = (
        f"{gpu['name']}: {plan['usable'] / 1e9:.1f} of {gpu['memory'] / 1e9:.0f} GB "
        "for tensors. Parts are by formula, and not all there at one time, so the peak is less "
        "than their sum."
    )
    verdict = of_plan(plan).says
    return Table("Memory", columns, tuple(body), caption=caption, digits=2, verdict=verdict)


def flops_table(plan: Record) -> Table:
    """Forward of a token and the whole step by part."""
    rows = tuple(
        (f["part"], f["forward_per_token"] / 1e6, f["step_per_gpu"] / 1e12, 100 * f["share"])
        for f in plan["flops"]
    )
    columns = ("part", "forward, MFLOP per token", "step, TFLOP per GPU", "share (%)")
    return Table("FLOPs", columns, rows, digits=3)


def scale_table(plan: Record) -> Table:
    """Each form over numbers of GPUs; what takes longest is the bottleneck."""
    rows = tuple(
        (
            row["gpus"],
            row["parallel"],
            row["micro_batch"],
            row["checkpointing"],
            (row["simulated"] or row["formula"]) / 1e9,
            sum(row["step"]["bytes_sent"].values()) / 1e9,
            *(row["step"][kind] for kind in ("arithmetic", "gradients", "weights", "tokens")),
            *(
                (row["seconds"], round(row["tokens_per_second"]), row["hours"])
                if row["fits"]
                else (None, None, None)
            ),
            row["bottleneck"],
        )
        for row in plan["scale"]
    )
    columns = (
        "GPUs", "form", "micro_batch", "checkpointing", "GB per GPU", "GB sent", "arithmetic s",
        "gradients s", "weights s", "tokens s", "step s", "tokens/s", "hours", "bottleneck",
    )  # fmt: skip
    caption = (
        f"{plan['gpu']['name']} at {100 * plan['utilization']:.0f}% of its arithmetic, imbalance "
        f"{plan['imbalance']:g} where experts are split. A step takes the longer of arithmetic and "
        "gradients with weights, then tokens. Sent: by one GPU in a step."
    )
    few = ("form", "GB per GPU", "tokens/s", "hours", "bottleneck")
    return Table("Over numbers of GPUs", columns, rows, caption=caption, digits=2, few=few)


def _name(row: Record) -> str:
    checkpointing = ", checkpointing" if row["checkpointing"] else ""
    return f"{row['parallel']}, micro_batch {row['micro_batch']}{checkpointing}"
