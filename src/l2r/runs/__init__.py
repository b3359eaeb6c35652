"""The run folder: how its files are laid out, written and read.

Imports stats/ only, and no torch. Begin at folder.py, whose docstring is the schema.
"""
