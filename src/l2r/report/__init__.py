"""Figures, tables and self-contained HTML pages of a checkpoint; never imports torch.

Imports files/ and stats/ only. Begin at diagnosis.py, mismatch.py or text_view.py; page.py is the
frame of all pages.
"""
