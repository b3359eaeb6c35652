"""Hugging Face: models, the swap, checkpoints, routes."""
