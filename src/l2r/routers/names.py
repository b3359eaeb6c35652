"""The paper's six routers in the paper's order: registered name -> label in its tables."""

PAPER_ROUTERS = {
    "linear": "Linear",
    "linear_sips": "Linear (SIPS)",
    "xmoe": "X-MoE",
    "l2r_dot": "L2R (Dot)",
    "l2r_cosine": "L2R (Cosine)",
    "l2r_sips": "L2R (SIPS)",
}
