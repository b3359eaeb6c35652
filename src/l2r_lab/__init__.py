"""Laboratory: train, compare, judge and plan routers; it stands on ``l2r``, never the reverse.

Begin at training/loop.py (one run), studies/study_plan.py (a study) or report/comparison.py (a
page).
"""
