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
    from l2r.cost.planning.first_line import announce as announce
    from l2r.cost.planning.first_line import reads_of_check as reads_of_check
    from l2r.cost.planning.first_line import reads_of_comparison as reads_of_comparison
    from l2r.cost.planning.first_line import reads_of_diagnosis as reads_of_diagnosis
    from l2r.cost.planning.first_line import reads_of_fit as reads_of_fit
    from l2r.cost.planning.first_line import reads_of_inputs as reads_of_inputs
    from l2r.cost.planning.first_line import reads_of_passages as reads_of_passages
    from l2r.cost.planning.first_line import reads_of_text as reads_of_text
    from l2r.cost.planning.first_line import rows_read as rows_read
    from l2r.cost.planning.hardware import find_gpu as find_gpu
    from l2r.cost.planning.recipe_model import recipe_sizes as recipe_sizes
    from l2r.cost.planning.records import plan_records as plan_records
else:
    __getattr__, __dir__ = lazy_names(__name__)
