"""Arithmetic on numbers: contrasts, intervals, chance, agreement; no torch."""
