"""Routers beyond the paper: a file each, and its import in routers/__init__.py registers it.

product_top_k.py is the selection of product_keys.py.
"""
