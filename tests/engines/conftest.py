"""Which column of docs/engines.md a test stands for goes into pytest's XML report."""

from importlib import metadata

from l2r.engines.engine import ENGINES
from l2r.versions import TRIED

PACKAGES = {TRIED[package].extra: package for package in ENGINES}


def pytest_collection_modifyitems(items):
    for item in items:
        for mark in item.iter_markers("engine"):
            name, column = mark.args
            item.user_properties.append(("engine", f"{name}:{column}"))
            item.user_properties.append(("version", metadata.version(PACKAGES[name])))
