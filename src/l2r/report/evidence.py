"""The table of the paper's claims, and its page for the documentation."""

from collections.abc import Sequence
from pathlib import Path

from l2r.report.tables import Table
from l2r.runs.atomic import write_text
from l2r.runs.folder import RunFolder

_PAPER_TOKENS = 10_000_000_000
_COLUMNS = ("claim", "paper", "tested as", "first", "second", "difference, 95%", "verdict")


def claims_table(rows: Sequence[tuple[str, ...]], seeds: int) -> Table:
    """A row per claim, as the findings give them."""
    caption = f"Means over {seeds} seeds; differences are paired by seed, intervals by Student's t."
    return Table("The paper's claims on a small model", _COLUMNS, tuple(rows), caption=caption)


def write_claims(path: Path, table: Table, run: RunFolder, command: str) -> None:
    """The table as Markdown, with the command that made it and the size and length of ``run``."""
    recipe = run.read_recipe()
    model, data = recipe["model"], recipe["data"]
    last = run.read_metrics("train")[-1]
    source = ", ".join(data["tokens"]) or data["corpus"]
    corpus = "the embedded corpus" if source == "embedded" else source
    text = f"""# Evidence

Made by

    {command}

The claims of the paper that a small run can carry, as they came out. The model has
{model["num_hidden_layers"]} layers of {model["hidden_size"]} and
{model["num_experts"]} experts of which {model["num_experts_per_tok"]} are chosen, and saw
{last["step"]} steps of {last["tokens"] // last["step"]:,} tokens of {corpus}:
{_PAPER_TOKENS / last["tokens"]:,.0f} times fewer tokens than in the paper.
A claim that is undecided or does not hold here may still hold there.

*holds*: the whole 95% interval of the difference, paired by seed, lies on the claimed side.
*does not hold*: all of it lies on the other side. Else *undecided here*. Of
{len(table.rows)} claims without any difference, tested at 95%, {0.05 * len(table.rows):.1f}
would be decided by chance.

{table.to_markdown()}
"""
    write_text(path, text)
