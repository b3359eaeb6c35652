"""Routes that differ: the same weights in other arithmetic, another checkpoint, another engine.

Imports diagnostics/, hf/ and below. Begin at mismatch.py.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.analysis.routes.arithmetic import in_other_arithmetic as in_other_arithmetic
    from l2r.analysis.routes.engine_answers import read_answers as read_answers
    from l2r.analysis.routes.mismatch import Comparison as Comparison
    from l2r.analysis.routes.mismatch import compare_models as compare_models
    from l2r.analysis.routes.mismatch import compare_routes as compare_routes
    from l2r.analysis.routes.mismatch import read_routing as read_routing
    from l2r.analysis.routes.step_gap import RouteGap as RouteGap
    from l2r.analysis.routes.step_gap import route_gap as route_gap
    from l2r.files.mismatch import ARITHMETICS as ARITHMETICS
else:
    __getattr__, __dir__ = lazy_names(__name__)
