"""Fit new routers to the ones they replace, and train on: ``l2r swap --fit``.

Imports text/ and below. Begin at fit.py.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.fitting.fit import FitReport as FitReport
    from l2r.fitting.fit import fit_routers as fit_routers
    from l2r.fitting.fit_options import FitOptions as FitOptions
    from l2r.fitting.fit_options import JointOptions as JointOptions
    from l2r.fitting.upcycling import upcycle as upcycle
else:
    __getattr__, __dir__ = lazy_names(__name__)
