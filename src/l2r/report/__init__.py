"""Figures, tables and one self-contained HTML page; reads run folders, never imports torch.

Imports runs/ and stats/ only. Begin at the file of a command: comparison.py (`l2r compare`, `make
demo`), diagnosis.py, sweep.py, evidence.py, mismatch.py; page.py is the frame of all pages.
"""
