"""Markdown tables; special characters in cells are escaped."""


def one_cell(text: str) -> str:
    """Text that neither ends a cell of a Markdown table nor its row."""
    return " ".join(text.splitlines()).replace("|", "\\|")
