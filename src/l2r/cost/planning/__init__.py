"""Planning: memory, communication, FLOPs and hours of a run that has not started.

recipe_model (a recipe's model without memory) -> cost, memory (formulas), simulate (torch's own
fake tensors and trackers) -> choose (which form, which micro_batch). Begin at choose.py.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.cost.planning.choose import make_plan as make_plan
    from l2r.cost.planning.cut import Assumptions as Assumptions
    from l2r.cost.planning.cut import check_form as check_form
    from l2r.cost.planning.first_line import Reads as Reads
    from l2r.cost.planning.first_line import check_reads as check_reads
    from l2r.cost.planning.first_line import diagnosis_reads as diagnosis_reads
    from l2r.cost.planning.first_line import first_line as first_line
    from l2r.cost.planning.first_line import fit_reads as fit_reads
    from l2r.cost.planning.hardware import find_gpu as find_gpu
    from l2r.cost.planning.recipe_model import recipe_sizes as recipe_sizes
    from l2r.cost.planning.records import plan_records as plan_records
else:
    __getattr__, __dir__ = lazy_names(__name__)
