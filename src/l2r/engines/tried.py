"""Which versions of an engine were tried: outside them its plug point may have moved."""

from packaging.specifiers import SpecifierSet


def outside_tried(engine: str, version: str, tried: str) -> str | None:
    """One line that names the range where ``version`` lies outside it, None inside."""
    if SpecifierSet(tried).contains(version, prereleases=True):
        return None
    return f"{engine} must be {tried}, the range tried; got {version}"
