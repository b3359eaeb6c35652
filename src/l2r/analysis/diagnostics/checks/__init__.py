"""Checks of a model's routers, losses and data before it is trained or used: table.py lists them.

They import the swap, whose families they know, and no transformers.
"""

from l2r.analysis.diagnostics.checks.finding import Finding
from l2r.analysis.diagnostics.checks.table import check_model

__all__ = ["Finding", "check_model"]
