"""Checks of a model's routers, losses and data before it is trained or used.

Imports the swap, whose families it knows, and no transformers. Begin at table.py, which lists them.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.analysis.diagnostics.checks.finding import Finding as Finding
    from l2r.analysis.diagnostics.checks.finding import counted as counted
    from l2r.analysis.diagnostics.checks.table import check_model as check_model
else:
    __getattr__, __dir__ = lazy_names(__name__)
