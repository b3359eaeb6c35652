"""Check of the experts' loads: dead, overloaded, and how many tokens it takes to say so.

Under a fair load each of T tokens chooses an expert with probability K / N. An expert is dead when
no token chose it, and a fair one would be missed in less than ALPHA of all checks. An expert is
overloaded when its share lies above sqrt(K / N), halfway (as ratios go) between a fair share and
every token, by more than chance explains in ALPHA of all checks (Chernoff's bound of a binomial
tail). ALPHA is divided by the number of experts in all layers, and a token that occurs twice in the
text counts once in T. Layers whose tokens go to all experts (K = N) have no loads to judge.

Shape letters: T tokens, N experts, K experts chosen per token.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from l2r.analysis.diagnostics.checks.finding import (
    Finding,
    counted,
    fault,
    in_layers,
    ok,
    skipped,
    warning,
)
from l2r.analysis.diagnostics.checks.losses import balances_more
from l2r.analysis.diagnostics.checks.subject import Subject
from l2r.functional import dead_experts, expert_usage, peak_load
from l2r.hf.swap import Site

ALPHA = 0.001


def loads(subject: Subject) -> Finding:
    """Experts that no token of the batch chose, and experts that far too many chose."""
    choosing = [site for site in subject.sites if _fair(site) < 1]
    if subject.is_drawn or not choosing:
        return skipped(
            "drawn inputs say nothing about loads; give a batch of text"
            if choosing
            else "every token goes to all experts of every layer"
        )
    mask, usage = subject.batch.get("attention_mask"), {}
    for site in choosing:
        logits, _, indices = subject.plain.routed[site.path]
        flat = mask.reshape(-1).bool() if mask is not None and mask.numel() == len(logits) else None
        usage[site] = expert_usage(indices, logits.shape[1], mask=flat).cpu()
    tokens = _different_tokens(subject, mask)
    level = ALPHA / sum(len(shares) for shares in usage.values())
    dead = {site: _dead(site, shares, tokens, level) for site, shares in usage.items()}
    if all(count is None for count in dead.values()):
        return skipped(
            f"{tokens} different tokens are too few; {_needed(choosing, level)} are needed"
        )
    collapsed = [
        s for s, count in dead.items() if count == s.sizes["num_experts"] - s.sizes["top_k"]
    ]
    if collapsed:
        return fault(
            f"every token goes to the same {collapsed[0].sizes['top_k']} experts in "
            f"{in_layers(collapsed)}",
            f"train from a checkpoint before the collapse, and {balances_more(subject)}",
        )
    empty = [site for site, count in dead.items() if count]
    if empty:
        total = sum(count or 0 for count in dead.values())
        return warning(
            f"none of {tokens} different tokens reaches {counted(total, 'expert')} in "
            f"{in_layers(empty)}; chance explains that in less than {ALPHA:.1%} of checks",
            "read more text (--instances N) of all domains; if they stay so, "
            f"{balances_more(subject)}",
        )
    full = [site for site, shares in usage.items() if _overloaded(site, shares, tokens, level)]
    if full:
        site = full[0]
        return warning(
            f"an expert in {in_layers(full)} gets {float(usage[site].max()):.0%} of the tokens, "
            f"where a fair share is {_fair(site):.0%} and the limit {_limit(site):.0%}",
            balances_more(subject),
        )
    peak = max(peak_load(shares) for shares in usage.values())
    some = f"of {tokens} different tokens every expert gets some"
    if unjudged := [site for site, count in dead.items() if count is None]:
        judged = [site for site in dead if site not in unjudged]
        some += f" in {in_layers(judged)} ({in_layers(unjudged)} would need more tokens)"
    return ok(f"{some}, at most {peak:.1f} fair shares")


def _fair(site: Site) -> float:
    return site.sizes["top_k"] / site.sizes["num_experts"]


def _limit(site: Site) -> float:
    return math.sqrt(_fair(site))


def _dead(site: Site, shares: Tensor, tokens: int, level: float) -> int | None:
    """Count the experts without a token; None where chance may have left them out."""
    if tokens * math.log1p(-_fair(site)) > math.log(level):
        return None
    return dead_experts(shares)


def _needed(sites: Sequence[Site], level: float) -> int:
    """Different tokens from which some layer's dead experts are no accident."""
    return min(math.ceil(math.log(level) / math.log1p(-_fair(site))) for site in sites)


def _overloaded(site: Site, shares: Tensor, tokens: int, level: float) -> bool:
    """Tell whether the largest share is above the limit by more than chance explains."""
    share, limit = min(float(shares.max()), 1.0), _limit(site)
    if share <= limit:
        return False
    divergence = share * math.log(share / limit)
    if share < 1:
        divergence += (1 - share) * math.log((1 - share) / (1 - limit))
    return -tokens * divergence < math.log(level)


def _different_tokens(subject: Subject, mask: Tensor | None) -> int:
    """Count the different token ids in the mask; of images, the number of routed tokens."""
    if not subject.reads_text:
        return min(len(logits) for logits in subject.plain.logits())
    ids = subject.batch["input_ids"]
    counted = ids if mask is None or mask.shape != ids.shape else ids[mask.bool()]
    return len(torch.unique(counted))
