"""Studies: many runs, and the judgement of their claims.

Imports engines/, cost/ and below. Begin at study_plan.py (a plan) or cells.py (a sweep).
"""
