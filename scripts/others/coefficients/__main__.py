"""Write the table of coefficients into docs/your-loop.md (make engines).

    python -m scripts.others.coefficients

Measures our losses and those of the installed transformers; the others are what the tests of
tests/engines/*/test_coefficients.py measured in the environments of the engines, and kept in
results/engines/coefficients.
"""

from importlib import metadata
from pathlib import Path

from l2r.files.atomic import write_text
from l2r.report.tables import Table
from scripts.others.coefficients.batch import COEFFICIENT
from scripts.others.coefficients.measure import Row, measure, read, write
from scripts.others.coefficients.stock import own_losses, stock_losses
from scripts.pages.marks import with_section

PAGE = Path(__file__).resolve().parents[3] / "docs" / "your-loop.md"
MARKS = "coefficients"
PARTS = ("l2r", "transformers", "megatron", "megatron-0.19", "olmo-core", "deepspeed")
COLUMNS = (
    "0.01 of", "adds", "gradient", "of ours", "the same here: balance=", "layers", "at balance",
    "padding", "packed rows", "micro-batches",
)  # fmt: skip


def cells(row: Row) -> tuple[str, ...]:
    """A row as the page shows it, but for its name."""
    same = 1 - row.cosine < 1e-6
    settings = "".join(f', {name}="{value}"' for name, value in sorted(row.here.items()))
    factor = f" * {row.formula}".replace(" * 1", "")
    return (
        f"{row.value:.4f}", f"{row.norm:.2e}",
        f"{row.ratio:.2f}" if same else f"{row.ratio:.2f}, cosine {row.cosine:.2f}",
        f"`{COEFFICIENT}{factor}{settings}`", row.layers, f"{row.at_balance:.0f}",
        row.padding, row.packed, row.micro_batches,
    )  # fmt: skip


def section() -> str:
    """The table, of all parts that are kept; what is equal in all columns shares a row."""
    names: dict[tuple[str, ...], list[str]] = {}
    versions: dict[tuple[str, ...], list[str]] = {}
    for part in PARTS:
        version, _, measured = read(part)
        for row in measured:
            framework, _, loss = row.name.partition(": ")
            key = (framework, *cells(row))
            names.setdefault(key, []).append(loss)
            versions.setdefault(key, []).append(version)
    shown = [
        (f"{key[0]} {', '.join(dict.fromkeys(versions[key]))}: {', '.join(dict.fromkeys(losses))}",
         *key[1:])
        for key, losses in names.items()
    ]  # fmt: skip
    return "\n" + Table("Coefficients", COLUMNS, tuple(shown)).to_markdown() + "\n"


def main() -> None:
    """Measure what is here, and write the page."""
    write("l2r", metadata.version("l2r-moe"), [measure(loss) for loss in own_losses()])
    stock = [measure(loss) for loss in stock_losses()]
    write("transformers", metadata.version("transformers"), stock)
    old = PAGE.read_text(encoding="utf-8")
    new = with_section(old, MARKS, section())
    if new != old:
        write_text(PAGE, new)
    print(section())


if __name__ == "__main__":
    main()
