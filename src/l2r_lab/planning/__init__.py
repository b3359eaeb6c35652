"""Planning: memory, communication, FLOPs and hours of a run that has not started.

sizes (of a recipe's model without memory) -> formula, simulate (torch's own fake tensors and
trackers) -> choose (which form, which micro_batch). Begin at choose.py.
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r_lab.planning.choose import make_plan as make_plan
    from l2r_lab.planning.choose import plan_records as plan_records
    from l2r_lab.planning.choose import planned_steps as planned_steps
    from l2r_lab.planning.cut import Assumptions as Assumptions
    from l2r_lab.planning.cut import check_form as check_form
    from l2r_lab.planning.cut import find_gpu as find_gpu
    from l2r_lab.planning.sizes import recipe_sizes as recipe_sizes
else:
    __getattr__, __dir__ = lazy_names(__name__)
