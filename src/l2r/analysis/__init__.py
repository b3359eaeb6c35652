"""Analysis of routers: diagnostics (metrics, robustness, checks) and certificates (proofs).

Imports training/ and below. Begin at conductor.py, which conducts a diagnosis: one pass over the
data (diagnostics/reading.py), whose reducers look at every router.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from l2r.analysis.conductor import Diagnosed, Extent, diagnose_checkpoint, diagnose_subject

__all__ = ["Diagnosed", "Extent", "diagnose_checkpoint", "diagnose_subject"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from l2r.analysis import conductor

    return getattr(conductor, name)
