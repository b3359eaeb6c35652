"""Training: one loop for language and vision, with its data, recipes and evaluation.

Imports hf/ and below. Begin at loop.py; step.py is one step of it.
"""
