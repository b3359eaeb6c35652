"""Stands in for transformers' export tests, which its source distribution leaves out."""


class ExportTesterMixin:
    """No tests."""
