"""What a run will take before it is paid for: memory, communication, FLOPs, hours.

recipe_model (a recipe's model without memory) -> cost, memory (formulas), simulate (torch's own
fake tensors and trackers) -> choose (which form, which micro_batch). router_scale: routers alone.
"""
