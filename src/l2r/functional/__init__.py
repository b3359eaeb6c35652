"""The paper's mathematics: read projection, scoring, pooling, selection, losses."""

from l2r.functional.losses import (
    dead_experts,
    expert_counts,
    expert_usage,
    load_balancing_loss,
    mean_probs,
    peak_load,
    router_margin_loss,
    router_z_loss,
    sequence_balance_loss,
)
from l2r.functional.scoring import (
    cosine_scores,
    dot_scores,
    low_rank_query,
    magnitude,
    phi,
    pool_anchors,
    psi,
    rms_norm,
    sips_scores,
    standardize_magnitude,
    unit,
)
from l2r.functional.selection import (
    best_experts,
    expert_weights,
    routing_probs,
    select_experts,
)

__all__ = [
    "best_experts",
    "cosine_scores",
    "dead_experts",
    "dot_scores",
    "expert_counts",
    "expert_usage",
    "expert_weights",
    "load_balancing_loss",
    "low_rank_query",
    "magnitude",
    "mean_probs",
    "peak_load",
    "phi",
    "pool_anchors",
    "psi",
    "rms_norm",
    "router_margin_loss",
    "router_z_loss",
    "routing_probs",
    "select_experts",
    "sequence_balance_loss",
    "sips_scores",
    "standardize_magnitude",
    "unit",
]
