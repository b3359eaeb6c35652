"""Pages of runs, sweeps, studies and plans; reads folders, never imports torch.

Begin at comparison.py (``l2r compare``, ``make demo``), sweep.py or evidence.py.
"""
