"""Every family's weights of given experts, gathered one by one in float64, from its own source."""

import torch

SOFTMAX = (
    "olmoe", "flex_olmo", "qwen2_moe", "qwen3_moe", "qwen3_next", "mellum", "jamba",
    "lara_mini", "qwen4_exp_text", "qwen3_omni_moe_thinker",
)  # fmt: skip
AMONG_CHOSEN = (
    "mixtral", "minimax", "qwen3_5_moe_text", "hunyuan_v1_moe", "gpt_oss", "granitemoe",
    "granitemoeshared", "granitemoehybrid", "qwen3_vl_moe", "aria_text", "granitemoe_swa",
)  # fmt: skip
DEEPSEEK_V3 = (
    "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "dots1", "solar_open",
    "exaone_moe", "nemotron_h", "glm_moe_dsa", "glm5_next", "glm4v_moe", "kimi_linear", "hy_v4",
    "hy_v4_vl", "axk1", "axk2", "bailing_hybrid", "dots3_note_text", "mimo_v2_flash",
)  # fmt: skip


def taken(scores, indices):
    """Scores [T, K] of the experts, read one by one."""
    rows = [torch.stack([scores[t, n] for n in row]) for t, row in enumerate(indices.tolist())]
    return torch.stack(rows)


def total(weights):
    return weights.sum(dim=-1, keepdim=True)


def softmax(router, logits, indices):
    chosen = taken(torch.softmax(logits, dim=-1), indices)
    return chosen / total(chosen) if getattr(router, "norm_topk_prob", False) else chosen


def among_chosen(router, logits, indices):
    exponentials = torch.exp(taken(logits, indices))
    return exponentials / total(exponentials)


def cohere(router, logits, indices):
    if router.expert_selection_fn == "softmax":
        return among_chosen(router, logits, indices)
    return sigmoid(logits, indices, normalized=router.norm_topk_prob)


def ernie(router, logits, indices):
    chosen = taken(torch.softmax(logits, dim=-1), indices)
    return chosen / total(chosen).clamp_min(router.norm_min)


def deepseek_v2(router, logits, indices):
    return taken(torch.softmax(logits, dim=-1), indices) * router.routed_scaling_factor


def sigmoid(logits, indices, *, normalized=True, added=0.0, scale=1.0):
    chosen = taken(1 / (1 + torch.exp(-logits)), indices)
    return (chosen / (total(chosen) + added) if normalized else chosen) * scale


def deepseek_v3(router, logits, indices):
    rule = {"normalized": router.norm_topk_prob, "scale": router.routed_scaling_factor}
    return sigmoid(logits, indices, added=1e-20, **rule)


def lfm2(router, logits, indices):
    rule = {"normalized": router.norm_topk_prob, "scale": router.routed_scaling_factor}
    return sigmoid(logits, indices, added=1e-6, **rule)


def mistral(router, logits, indices):
    """The flag is Mistral 4's alone; Mistral Large 4 always normalizes."""
    chosen = taken(torch.softmax(logits, dim=-1), indices)
    divided = chosen / total(chosen) if getattr(router, "norm_topk_prob", True) else chosen
    return divided * router.routed_scaling_factor


def deepseek_v4(router, logits, indices):
    if type(router.score_fn).__name__ == "Sigmoid":
        return sigmoid(logits, indices, added=1e-20, scale=router.routed_scaling_factor)
    roots = torch.log1p(torch.exp(taken(logits, indices))).sqrt()
    return roots / total(roots) * router.routed_scaling_factor


def muse_spark(router, logits, indices):
    added, scale = router.norm_topk_prob_eps, router.routed_scaling_factor
    return sigmoid(logits, indices, added=added, scale=scale)


def by_flag(router, logits, indices):
    return sigmoid(logits, indices, normalized=router.norm_topk_prob)


def sparse_mixture(router, logits, indices):
    """Softmax of an expert among those within reach of the best, itself among them; twice."""
    reach, rows = 2 * router.router_jitter_noise, []
    for row, chosen in zip(logits, indices.tolist(), strict=True):
        weights, left = [], list(range(len(row)))
        for expert in chosen:
            values = row.tolist()
            best = max(values[n] for n in left)
            far = {n for n in left if (best - values[n]) / max(abs(values[n]), best) > reach}
            near = [n for n in left if n == expert or n not in far]
            exponentials = torch.exp(row[near])
            weights.append(exponentials[near.index(expert)] / exponentials.sum())
            left.remove(expert)
        rows.append(torch.stack(weights))
    return torch.stack(rows)


RULES = {
    **dict.fromkeys(SOFTMAX, softmax),
    **dict.fromkeys(AMONG_CHOSEN, among_chosen),
    **dict.fromkeys(DEEPSEEK_V3, deepseek_v3),
    "cohere2_moe": cohere,
    "ernie4_5_moe": ernie,
    "deepseek_v2": deepseek_v2,
    "laguna": lambda router, *given: sigmoid(*given),
    "minimax_m2": lambda router, *given: sigmoid(*given),
    "lfm2_moe": lfm2,
    "afmoe": lambda router, *given: sigmoid(*given, added=1e-20, scale=router.route_scale),
    "hy_v3": lambda router, *given: sigmoid(
        *given, added=1e-20, scale=router.router_scaling_factor
    ),
    "phimoe": sparse_mixture,
    **dict.fromkeys(("mistral4", "mistral_large4"), mistral),
    **dict.fromkeys(("deepseek_v4", "inkling2_text", "inkling2_loop_text"), deepseek_v4),
    **dict.fromkeys(("beam", "flint", "kolibri1"), by_flag),
    **dict.fromkeys(("minimax_m3_vl_text", "step3p7"), lambda router, *given: sigmoid(*given)),
    "ernie4_5_vl_moe": ernie,
    **dict.fromkeys(("unlimited_ocr", "deepseek_ocr2"), deepseek_v2),
    "muse_spark": muse_spark,
    "longcat_flash": deepseek_v2,
    "openai_privacy_filter": lambda router, *given: among_chosen(router, *given) / router.top_k,
}


def weights_by_hand(family, router, logits, indices):
    """Weights [T, K] in float64; ``router`` is the family's own, for its settings."""
    return RULES[family](router, logits.double(), indices)
