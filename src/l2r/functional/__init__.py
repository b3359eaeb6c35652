"""The paper's mathematics: read projection, scoring, pooling, selection, losses."""

from l2r.functional.losses import (
    expert_counts,
    expert_usage,
    load_balancing_loss,
    mean_probs,
    router_margin_loss,
    router_z_loss,
)
from l2r.functional.pooling import pool_anchors
from l2r.functional.projection import low_rank_query, magnitude, rms_norm, standardize_magnitude
from l2r.functional.scoring import cosine_scores, dot_scores, phi, psi, sips_scores, unit
from l2r.functional.selection import (
    best_experts,
    expert_weights,
    routing_probs,
    select_experts,
)

__all__ = [
    "best_experts",
    "cosine_scores",
    "dot_scores",
    "expert_counts",
    "expert_usage",
    "expert_weights",
    "load_balancing_loss",
    "low_rank_query",
    "magnitude",
    "mean_probs",
    "phi",
    "pool_anchors",
    "psi",
    "rms_norm",
    "router_margin_loss",
    "router_z_loss",
    "routing_probs",
    "select_experts",
    "sips_scores",
    "standardize_magnitude",
    "unit",
]
