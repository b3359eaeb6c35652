"""Stands in for transformers' generation tests, which its source distribution leaves out."""


class GenerationTesterMixin:
    """No tests; models that generate must have a tester of this type."""
