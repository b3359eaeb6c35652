"""Planning: memory, communication, FLOPs and hours of a run that has not started.

recipe_model (a recipe's model without memory) -> cost, memory (formulas), simulate (torch's own
fake tensors and trackers) -> choose (which form, which micro_batch).
"""
