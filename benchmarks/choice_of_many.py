"""Time of choosing 16 of 1,024 to 65,536 experts: product keys, L2R, linear, and top-k alone.

    OMP_NUM_THREADS=1 python -m benchmarks.choice_of_many > results/choice-of-many.md

d = 512, 256 tokens, fp32, weights and indices without gradients. Two tables: routers over the
router of transformers' OLMoE, and top-k of given logits over ``torch.topk``, both with the softmax
weights of the chosen. All contenders of a column take turns. ``choose`` is the call that a MoE
layer makes where no loss needs all logits; product keys then score all rows and all columns and
combine the 16 best of each, 256 candidates, from 1,025 experts on.
"""

import argparse
from collections.abc import Callable

import torch

from benchmarks.router_ratios import ratios, table
from l2r.hf.models import one_layer
from l2r.kernels import dispatch
from l2r.routers import build_router
from l2r_lab.timing import Step, environment, measure

HIDDEN, CHOSEN, TOKENS = 512, 16, 256
EXPERTS = (1024, 4096, 16384, 65536)
STOCK, TORCH = "linear, transformers", "torch.topk"


def routers(experts: int, x: torch.Tensor) -> dict[str, Step]:
    """Make a call of every router; ours are checked against all their logits first."""
    sizes = {"hidden_size": HIDDEN, "num_experts": experts, "top_k": CHOSEN}
    torch.manual_seed(0)
    stock = one_layer(**sizes).model.layers[0].mlp.gate
    own = {
        "linear": build_router("linear", **sizes),
        "L2R, rank 32": build_router("l2r_sips", rank=32, heads=1, **sizes),
        "product keys, 16 numbers": build_router("product_keys", rank=16, **sizes),
        "product keys, 64 numbers": build_router("product_keys", rank=64, **sizes),
    }
    steps: dict[str, Step] = {STOCK: lambda _: stock(x)}
    for name, router in own.items():
        best = router.logits(x).topk(CHOSEN).values.sort().values
        chosen = router.logits(x).gather(1, router.choose(x)[1]).sort().values
        torch.testing.assert_close(chosen, best)  # equals may be taken in another order
        steps[f"{name}, all logits"] = repeated(router, x)
        if name.startswith("product"):
            steps[f"{name}, choose"] = repeated(router.choose, x)
    return steps


def repeated(call: Callable[[torch.Tensor], object], x: torch.Tensor) -> Step:
    """Make a step that makes the same call every time."""
    return lambda number: call(x)


def selections(logits: torch.Tensor) -> dict[str, Step]:
    """Weights and indices of given logits."""

    def stock(_: int) -> None:
        torch.topk(logits.softmax(dim=-1), CHOSEN)

    return {TORCH: stock, "ours": lambda _: dispatch.softmax_top_k(logits, CHOSEN)}


@torch.no_grad()
def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="for all contenders of a column")
    seconds = parser.parse_args().seconds
    machine = environment()
    print(
        f"{machine['processor']}, torch {machine['torch']}, {machine['threads']} threads, ours in "
        f"{machine['cpu_routers']}; median of 7 turns and range, processor time."
    )
    x = torch.randn(TOKENS, HIDDEN)
    for title, base in (("Routers, forward", STOCK), ("Softmax and top-k of given logits", TORCH)):
        columns: dict[str, dict[str, str]] = {}
        names: list[str] = []
        for experts in EXPERTS:
            logits = torch.randn(TOKENS, experts)
            steps = routers(experts, x) if base == STOCK else selections(logits)
            names = list(steps)
            timings = measure(steps, seconds=seconds, rounds=7, clock="cpu")
            columns[f"N {experts:,}"] = ratios(timings, [base])
        table(title, columns, names)


if __name__ == "__main__":
    main()
