"""Adversarial tries at certified radii, a row per router: none may succeed.

    python scripts/proofs/certificates.py --tries 100000

Every router gets tokens, their certified radii (first expert and chosen set), a search for the
smallest flip, and at least ``--tries`` projected-gradient tries to flip a decision inside its
certified ball, each of which looks at four points. Routers have random parameters, moved away
from their start. Exit code 1 if any try succeeds.
"""

import argparse
import json
import sys
import time
from typing import Any

import torch
from torch import nn

from l2r import build_router
from l2r.analysis.certificates.attack import count_violations, find_flip
from l2r.analysis.certificates.certify import certify

ROUTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "linear_sips": ("linear_sips", {}),
    "xmoe": ("xmoe", {}),
    "l2r_dot H=1": ("l2r_dot", {"heads": 1}),
    "l2r_sips H=1": ("l2r_sips", {"heads": 1}),
    "l2r_dot H=16": ("l2r_dot", {}),
    "l2r_cosine H=16": ("l2r_cosine", {}),
    "l2r_sips H=16": ("l2r_sips", {}),
    "l2r_sips H=16, batchnorm": ("l2r_sips", {"query_norm": "batchnorm"}),
    "l2r_sips H=4, rank 8": ("l2r_sips", {"heads": 4, "rank": 8}),
}


def main() -> None:
    """Parse, run, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tries", type=int, default=100_000, help="per router and decision")
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--only", help="names, separated by semicolons")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = options.only.split(";") if options.only else list(ROUTERS)
    rows = [row for name in names for row in measure(name, options)]
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        head = list(rows[0])
        print(" | ".join(head))
        for row in rows:
            print(" | ".join(f"{v:.4f}" if isinstance(v, float) else f"{v}" for v in row.values()))
    sys.exit(any(row["violations"] for row in rows))


def measure(name: str, options: argparse.Namespace) -> list[dict[str, object]]:
    """Two rows: first expert and chosen set."""
    router = moved(name, options)
    x = 1.3 * torch.randn(options.tokens, options.hidden_size)
    begun = time.perf_counter()
    radii = certify(router, x)
    seconds = time.perf_counter() - begun
    rounds = -(-options.tries // options.tokens)
    rows = []
    for kind, radius in (("top-1", radii.top1), ("top-k", radii.topk)):
        top1 = kind == "top-1"
        found = find_flip(router, x, top1=top1)
        ratio = radius / found
        broken = count_violations(router, x, radius, top1=top1, tries=rounds, steps=3)
        rows.append(
            {
                "router": name,
                "decision": kind,
                "certified (median)": radius.median().item(),
                "found (median)": found.median().item(),
                "tightness (mean)": ratio.mean().item(),
                "tightness (worst)": ratio.min().item(),
                "tries": rounds * len(x),
                "violations": broken,
                "certify, s": seconds,
            }
        )
        print(f"{name}, {kind}: {broken} violations", file=sys.stderr)
    return rows


def moved(name: str, options: argparse.Namespace) -> nn.Module:
    """The router with anchors of different norms and an uneven gain."""
    kind, choices = ROUTERS[name]
    torch.manual_seed(0)
    sizes = {"num_experts": options.experts, "top_k": options.top_k}
    router = build_router(kind, hidden_size=options.hidden_size, **sizes, **choices).eval()
    with torch.no_grad():
        for part, value in router.named_parameters():
            if part == "anchors":
                value.mul_(1 + 0.4 * torch.randn_like(value[..., :1]).abs())
            if part == "norm.weight":
                value.add_(0.3 * torch.randn_like(value))
    return router


if __name__ == "__main__":
    main()
