"""The one place that chooses an implementation; every router calls these names.

All implementations have the signatures and results of l2r.kernels.plain.
"""

from l2r.kernels.plain import anchor_logits, linear_logits, routing_query, softmax_top_k

__all__ = ["anchor_logits", "linear_logits", "routing_query", "softmax_top_k"]
