"""Routers beyond the paper."""
