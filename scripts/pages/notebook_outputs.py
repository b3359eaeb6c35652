"""Run the notebooks and keep what their cells print; figures are not kept, they are megabytes.

    python scripts/pages/notebook_outputs.py

Needs no kernel: cells run in one namespace, and the expression that ends a cell is shown as its
repr. A test runs them again and compares: all but the values of decimals.
"""

import ast
import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def run(path: Path) -> list[str]:
    """Text of every code cell of a notebook, in order: what it prints, then what it ends with.

    A figure that ends a cell is drawn and gives no text.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    texts = []
    for number, source in enumerate(code(path)):
        tree = ast.parse(source)
        last = tree.body[-1]
        value: Any = None
        with redirect_stdout(io.StringIO()) as printed:
            end = ast.Expression(last.value) if isinstance(last, ast.Expr) else None
            if end is not None:
                tree.body.pop()
            exec(compile(tree, f"{path.name}, cell {number}", "exec"), namespace)
            if end is not None:
                value = eval(compile(end, f"{path.name}, cell {number}", "eval"), namespace)
        if hasattr(value, "to_plotly_json"):
            assert value.data and value.to_json()
            value = None
        texts.append(printed.getvalue() + ("" if value is None else repr(value)))
    return texts


def cells(path: Path) -> list[dict[str, Any]]:
    """Code cells of a notebook, as its file has them."""
    everything = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in everything if cell["cell_type"] == "code"]


def code(path: Path) -> list[str]:
    """Sources of the code cells."""
    return ["".join(cell["source"]) for cell in cells(path)]


def kept(path: Path) -> list[str]:
    """Outputs of the code cells as they are committed."""
    return ["".join("".join(o["text"]) for o in cell["outputs"]) for cell in cells(path)]


def write(path: Path) -> None:
    """Put the outputs of a run into the notebook."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    texts = iter(run(path))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            lines = next(texts).splitlines(keepends=True)
            stream = {"name": "stdout", "output_type": "stream", "text": lines}
            cell["outputs"] = [stream] if lines else []
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for notebook in sorted(NOTEBOOKS.glob("*.ipynb")):
        write(notebook)
