"""Which column of docs/engines.md a test stands for goes into pytest's XML report."""


def pytest_collection_modifyitems(items):
    for item in items:
        for mark in item.iter_markers("engine"):
            item.user_properties.append(("engine", ":".join(mark.args)))
