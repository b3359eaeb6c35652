"""Diagnostics: metrics of routing, robustness, usage and geometry, checks before training."""
