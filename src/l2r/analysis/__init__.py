"""Analysis of routers: diagnostics (metrics, robustness, checks) and certificates (proofs).

Imports training/ and below. Begin at conductor.py, which conducts a diagnosis: one pass over the
data (diagnostics/data_pass.py), whose reducers look at every router.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.analysis.conductor import Diagnosed as Diagnosed
    from l2r.analysis.conductor import diagnose_checkpoint as diagnose_checkpoint
    from l2r.analysis.conductor import diagnose_subject as diagnose_subject
    from l2r.analysis.extent import Extent as Extent
    from l2r.analysis.extent import earlier_checkpoints as earlier_checkpoints
    from l2r.analysis.inputs import Subject as Subject
    from l2r.analysis.inputs import open_subject as open_subject
    from l2r.analysis.inputs import rows_of_text as rows_of_text
    from l2r.analysis.own_text import passages as passages
    from l2r.analysis.own_text import route_text as route_text
    from l2r.analysis.run_inputs import load_final as load_final
    from l2r.analysis.run_inputs import open_run as open_run
    from l2r.analysis.run_inputs import validation_subject as validation_subject
else:
    __getattr__, __dir__ = lazy_names(__name__)
