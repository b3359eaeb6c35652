"""Studies: many runs, and the judgement of their claims.

Imports engines/, cost/ and below. Begin at study_plan.py (a plan) or cells.py (a sweep).
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r.studies.cells import Cell as Cell
    from l2r.studies.cells import folder_cells as folder_cells
    from l2r.studies.cells import grid_cells as grid_cells
    from l2r.studies.cells import read_grid as read_grid
    from l2r.studies.judging import Places as Places
    from l2r.studies.judging import results_of as results_of
    from l2r.studies.judging import study_of as study_of
    from l2r.studies.measure import diagnose_run as diagnose_run
    from l2r.studies.new_plan import PLANNED_POWER as PLANNED_POWER
    from l2r.studies.new_plan import Question as Question
    from l2r.studies.new_plan import seconds_per_run as seconds_per_run
    from l2r.studies.new_plan import write_plan as write_plan
    from l2r.studies.registration import read_plan as read_plan
    from l2r.studies.schedule import Budget as Budget
    from l2r.studies.schedule import StudyStoppedError as StudyStoppedError
    from l2r.studies.schedule import run_plan as run_plan
    from l2r.studies.share import run_share as run_share
    from l2r.studies.side_by_side import suitable_processes as suitable_processes
    from l2r.studies.study_plan import Plan as Plan
    from l2r.studies.train_cells import Outcome as Outcome
    from l2r.studies.train_cells import is_finished as is_finished
    from l2r.studies.train_cells import run_cells as run_cells
else:
    __getattr__, __dir__ = lazy_names(__name__)
