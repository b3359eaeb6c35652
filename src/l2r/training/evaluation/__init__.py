"""Evaluation: downstream tasks, perplexity, accuracy."""
