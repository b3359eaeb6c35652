"""Names of the metrics of studies, on pages and in verdicts."""

METRICS = {
    "top1": "top-1",
    "validation_ce": "validation CE",
    "train_ce": "training CE",
    "routing_gain": "routing gain",
    "shuffled_gain": "shuffled gain",
    "load_entropy": "load entropy",
    "max_over_mean": "max / mean load",
    "scale_free_margin": "margin / spread",
    "stability": "stability, noise 0.02",
    "relative_stability": "stability, noise 0.1 rms",
    "logit_spread": "logit spread",
    "weight_sum": "sum of the k weights",
    "first_experts": "experts ever first",
    "flipped_decisions": "decisions flipped by bf16",
    "flipped_tokens": "tokens flipped by bf16",
}
