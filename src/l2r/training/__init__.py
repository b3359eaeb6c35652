"""Training: one loop for language and vision, its recipes, checkpoints and sweeps."""
