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
    "train_ce_third_quarter": "training CE, third quarter",
    "train_ce_last_quarter": "training CE, last quarter",
    "train_ce_late_change": "training CE, last - third quarter",
    "bf16_flipped_tokens": "tokens with other experts in bf16",
    "bf16_ce_change": "CE in bf16 - in fp32",
    "bf16_kl": "KL to bf16",
    "bf16_kl_replay_share": "share of KL to bf16 that replay takes away",
    "int8_flipped_tokens": "tokens with other experts in int8",
    "int8_ce_change": "CE in int8 - in fp32",
    "int8_kl": "KL to int8",
    "int8_kl_replay_share": "share of KL to int8 that replay takes away",
}
SMALL = ("bf16_ce_change", "bf16_kl", "int8_ce_change", "int8_kl")  # far below 0.0001 nats
# Metrics in nats per token or image.
NATS = (
    "validation_ce", "train_ce", "routing_gain", "shuffled_gain", "train_ce_third_quarter",
    "train_ce_last_quarter", "train_ce_late_change", "bf16_ce_change", "bf16_kl", "int8_ce_change",
    "int8_kl",
)  # fmt: skip
