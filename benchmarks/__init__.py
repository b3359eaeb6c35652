"""Benchmarks, one script each: ``python -m benchmarks.router`` from the root of the repository.

Contenders take turns (l2r_lab/timing.py); wrong results are not timed.
"""
