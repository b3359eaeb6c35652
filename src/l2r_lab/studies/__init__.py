"""Studies: many runs, and the judgement of their claims.

Imports files/, training/ and below. Begin at study_plan.py (a plan) or cells.py (a sweep).
"""

from typing import TYPE_CHECKING

from l2r.imports import lazy_names

if TYPE_CHECKING:
    from l2r_lab.studies.cells import Cell as Cell
    from l2r_lab.studies.cells import folder_cells as folder_cells
    from l2r_lab.studies.cells import grid_cells as grid_cells
    from l2r_lab.studies.cells import read_grid as read_grid
    from l2r_lab.studies.judging import StudyPlaces as StudyPlaces
    from l2r_lab.studies.judging import results_of as results_of
    from l2r_lab.studies.judging import study_of as study_of
    from l2r_lab.studies.measure import diagnose_run as diagnose_run
    from l2r_lab.studies.new_plan import PLANNED_POWER as PLANNED_POWER
    from l2r_lab.studies.new_plan import Question as Question
    from l2r_lab.studies.new_plan import seconds_per_run as seconds_per_run
    from l2r_lab.studies.new_plan import write_plan as write_plan
    from l2r_lab.studies.plan_runs import Budget as Budget
    from l2r_lab.studies.plan_runs import StudyStoppedError as StudyStoppedError
    from l2r_lab.studies.plan_runs import run_plan as run_plan
    from l2r_lab.studies.plan_runs import run_share as run_share
    from l2r_lab.studies.registration import read_plan as read_plan
    from l2r_lab.studies.running import suitable_processes as suitable_processes
    from l2r_lab.studies.study_plan import StudyPlan as StudyPlan
    from l2r_lab.studies.train_cells import Outcome as Outcome
    from l2r_lab.studies.train_cells import is_finished as is_finished
    from l2r_lab.studies.train_cells import run_cells as run_cells
    from l2r_lab.studies.train_cells import share_cells as share_cells
    from l2r_lab.studies.train_cells import with_finished_runs as with_finished_runs
else:
    __getattr__, __dir__ = lazy_names(__name__)
