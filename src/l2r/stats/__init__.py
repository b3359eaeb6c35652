"""Arithmetic on numbers: contrasts and verdicts, intervals, chance, agreement, entropy.

Imports numpy and scipy only. Begin at contrasts.py (verdicts) or intervals.py.
"""
