"""Judgement: contrasts, effects, paired t.

Imports numpy, scipy and l2r.stats. Begin at contrasts.py.
"""
