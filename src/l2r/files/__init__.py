"""Formats of what the library writes, writes that happen whole or not at all, the cache.

Imports stats/ only, and no torch. Begin at folder.py, whose docstring is the schema
of a run folder.
"""
