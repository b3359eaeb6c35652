"""Sections of the docs that a script writes, between <!-- name --> and <!-- end of name -->."""


def with_section(text: str, name: str, section: str) -> str:
    """Return the page with ``section`` as the text between the marks of ``name``.

    Raises ValueError for a page without them.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    head, opened, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (opened and closed):
        raise ValueError(f"the page must hold the marks {begin.strip()} and {end.strip()}")
    return f"{head}{begin}{section}{end}{tail}"


def section_of(text: str, name: str) -> str:
    """Return the text between the marks of ``name``."""
    return text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- end of {name} -->\n")[0]
