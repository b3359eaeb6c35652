"""Routers beyond the paper, and the presets that other code bases have for X-MoE."""
