"""Routers beyond the paper: a file each, and its import in routers/__init__.py registers it."""
