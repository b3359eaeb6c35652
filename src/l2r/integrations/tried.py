"""Which versions of an engine were tried: outside them its plug point may have moved."""

from packaging.version import Version


def outside_tried(engine: str, version: str, first: str, below: str) -> str | None:
    """One line that names the range where ``version`` lies outside it, None inside."""
    if Version(first) <= Version(version) < Version(below):
        return None
    return f"{engine} must be >= {first} and < {below}, the range tried; got {version}"
