"""Analysis of routers: diagnostics (metrics, robustness, checks) and certificates (proofs).

Imports images/ and below. Begin at conductor.py, which conducts a diagnosis: one pass over the
data (diagnostics/data_pass.py), whose reducers look at every router.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.analysis.conductor import Diagnosed as Diagnosed
    from l2r.analysis.conductor import diagnose_checkpoint as diagnose_checkpoint
    from l2r.analysis.conductor import diagnose_subject as diagnose_subject
    from l2r.analysis.diagnostics.settings import Extent as Extent
    from l2r.analysis.diagnostics.settings import earlier_checkpoints as earlier_checkpoints
    from l2r.analysis.first_line import Reads as Reads
    from l2r.analysis.first_line import announce as announce
    from l2r.analysis.first_line import reads_of_check as reads_of_check
    from l2r.analysis.first_line import reads_of_comparison as reads_of_comparison
    from l2r.analysis.first_line import reads_of_diagnosis as reads_of_diagnosis
    from l2r.analysis.first_line import reads_of_fit as reads_of_fit
    from l2r.analysis.first_line import reads_of_inputs as reads_of_inputs
    from l2r.analysis.first_line import reads_of_passages as reads_of_passages
    from l2r.analysis.first_line import reads_of_text as reads_of_text
    from l2r.analysis.first_line import rows_read as rows_read
    from l2r.analysis.inputs import DiagnosisSubject as DiagnosisSubject
    from l2r.analysis.inputs import open_subject as open_subject
    from l2r.analysis.inputs import rows_of_text as rows_of_text
    from l2r.analysis.own_text import passages as passages
    from l2r.analysis.own_text import route_text as route_text
else:
    __getattr__, __dir__ = lazy_names(__name__)
