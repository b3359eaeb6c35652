"""Files of the laboratory: a study's results, the progress of a run.

Imports l2r.files and below, and no torch.
"""
