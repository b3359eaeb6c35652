"""Arithmetic on numbers: intervals, chance, agreement, entropy.

Imports numpy and scipy only. Begin at intervals.py.
"""
