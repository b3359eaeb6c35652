"""The paper's claims that a small run can test, and what several seeds say of each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from l2r.runs.statistics import Interval, mean_interval

Verdict = Literal["holds", "does not hold", "undecided here"]

# Variants that the claims compare: name -> router section of a recipe.
VARIANTS: dict[str, dict[str, object]] = {
    "linear": {"kind": "linear"},
    "linear_sips": {"kind": "linear_sips"},
    "xmoe": {"kind": "xmoe"},
    "l2r_dot-h1": {"kind": "l2r_dot", "rank": 2, "heads": 1},
    "l2r_sips-h1": {"kind": "l2r_sips", "rank": 2, "heads": 1},
    "l2r_dot": {"kind": "l2r_dot", "rank": 2, "heads": 16},
    "l2r_cosine": {"kind": "l2r_cosine", "rank": 2, "heads": 16},
    "l2r_sips": {"kind": "l2r_sips", "rank": 2, "heads": 16},
    # the paper's rank ablation has four heads
    "l2r_sips-h4": {"kind": "l2r_sips", "rank": 2, "heads": 4},
    "l2r_sips-r32-h4": {"kind": "l2r_sips", "rank": 32, "heads": 4},
}


@dataclass(frozen=True)
class Claim:
    """``first`` has a larger (or smaller) ``field`` than ``second``; ``where`` in the paper."""

    where: str
    text: str
    field: str
    first: str
    second: str
    larger: bool


CLAIMS = (
    Claim("Table 4", "SIPS widens the mean margin of the dot product (H = 1)",
          "mean_margin", "l2r_sips-h1", "l2r_dot-h1", True),
    Claim("not in the paper", "the same with the margin divided by the logits' spread",
          "scale_free_margin", "l2r_sips-h1", "l2r_dot-h1", True),
    Claim("Table 4", "SIPS lowers the low-margin rate of the dot product (H = 1)",
          "low_margin_rate", "l2r_sips-h1", "l2r_dot-h1", False),
    Claim("Table 4", "SIPS (H = 1) has a larger mean margin than X-MoE",
          "mean_margin", "l2r_sips-h1", "xmoe", True),
    Claim("Table 8", "SIPS restores the stability that the low-rank dot product loses (H = 1)",
          "stability", "l2r_sips-h1", "l2r_dot-h1", True),
    Claim("Table 8", "SIPS restores the top-k overlap likewise (H = 1)",
          "topk_overlap", "l2r_sips-h1", "l2r_dot-h1", True),
    Claim("Table 8", "SIPS makes the full-rank linear router more stable",
          "stability", "linear_sips", "linear", True),
    Claim("Table 8", "SIPS raises the top-k overlap of the full-rank linear router",
          "topk_overlap", "linear_sips", "linear", True),
    Claim("Figure 2", "pairwise-cosine variance is larger in L2R's queries than in X-MoE's",
          "cosine_variance", "l2r_sips", "xmoe", True),
    Claim("Figure 2", "pairwise-cosine variance is larger in X-MoE's queries than in x",
          "cosine_variance", "xmoe", "linear", True),
    Claim("Figure 4", "L2R ends with a lower load-balance loss than the linear router",
          "balance", "l2r_sips", "linear", False),
    Claim("Figure 4", "L2R ends with a lower training loss than the linear router",
          "train_ce", "l2r_sips", "linear", False),
    Claim("Figure 4", "L2R ends with a lower validation loss than the linear router",
          "validation_ce", "l2r_sips", "linear", False),
    Claim("Section 4.1", "L2R (SIPS) ends with a lower validation loss than L2R (Dot)",
          "validation_ce", "l2r_sips", "l2r_dot", False),
    Claim("Section 4.1", "L2R (SIPS) ends with a lower validation loss than L2R (Cosine)",
          "validation_ce", "l2r_sips", "l2r_cosine", False),
    Claim("Section 4.1", "X-MoE ends with a lower training loss than the linear router",
          "train_ce", "xmoe", "linear", False),
    Claim("Figure 5b", "16 anchors reach a lower training loss than 1 (rank 2)",
          "train_ce", "l2r_sips", "l2r_sips-h1", False),
    Claim("Figure 5a", "rank 2 reaches a lower training loss than rank 32 (H = 4)",
          "train_ce", "l2r_sips-h4", "l2r_sips-r32-h4", False),
    Claim("Figure 7", "L2R's top-1 map is sharper than the linear router's",
          "top1_entropy", "l2r_sips", "linear", False),
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A claim with the means of both sides, the paired difference and the verdict."""

    claim: Claim
    first: float
    second: float
    difference: Interval
    verdict: Verdict

    def row(self) -> tuple[str, ...]:
        """The finding in words and numbers: a row of the table of claims."""
        claim, gap = self.claim, self.difference
        sign = "larger" if claim.larger else "smaller"
        return (
            claim.text,
            claim.where,
            f"{claim.field}: {claim.first} {sign} than {claim.second}",
            f"{self.first:.4f}",
            f"{self.second:.4f}",
            f"{gap.mean:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]",
            self.verdict,
        )


def judge(claim: Claim, numbers: Mapping[str, Sequence[Mapping[str, float]]]) -> Finding:
    """Verdict on one claim from ``numbers``: variant -> one dictionary per seed, same seeds.

    The difference is paired by seed. ``holds`` when its whole 95% interval lies on the claimed
    side of zero, ``does not hold`` when all of it lies on the other, else ``undecided here``.
    Raises ValueError for fewer than two seeds or lists of different length.
    """
    first = [row[claim.field] for row in numbers[claim.first]]
    second = [row[claim.field] for row in numbers[claim.second]]
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(
            f"a verdict needs the same seeds on both sides, at least 2; "
            f"got {len(first)} and {len(second)}"
        )
    gap = mean_interval([a - b for a, b in zip(first, second, strict=True)])
    low, high = (gap.low, gap.high) if claim.larger else (-gap.high, -gap.low)
    verdict: Verdict = "undecided here"
    if low > 0:
        verdict = "holds"
    elif high < 0:
        verdict = "does not hold"
    return Finding(claim, sum(first) / len(first), sum(second) / len(second), gap, verdict)
