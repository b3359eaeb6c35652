"""What the guard of the GPU kernels costs and says: seconds of a comparison, compiled and not.

    python scripts/machines/guard_cost.py --out results/gpu

Every kind of call is compared twice: the first time its kernels are compiled, the second not, which
should take less than 50 ms. Then the step of a small model is run with every wait for the device an
error (torch's own check). Writes guard.json. Exit code 1 where a kernel is refused or a step waits.
"""

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from l2r import build_router
from l2r.kernels import guard
from l2r_lab.planning.sizes import example_batch
from l2r_lab.training.optimizer import build_optimizer
from l2r_lab.training.ranks import Ranks
from l2r_lab.training.recipes.load import load_recipe
from l2r_lab.training.recipes.schema import LanguageRecipe
from l2r_lab.training.step import TrainingStep

KINDS: dict[str, dict[str, Any]] = {
    "l2r_sips": {},
    "l2r_sips, rank 16": {"rank": 16},
    "xmoe": {},
    "linear": {},
}
DEVICE = torch.device("cuda")


def compared(kind: str, dtype: torch.dtype) -> list[guard.KernelVerdict]:
    """A router's first call in a fresh process, and in one that has its kernels."""
    options = KINDS[kind]
    sizes = {"hidden_size": 2048, "num_experts": 64, "top_k": 8}
    router = build_router(kind.split(",", maxsplit=1)[0], **sizes, **options).to(DEVICE)
    x = torch.randn(4096, 2048, device=DEVICE, dtype=dtype)
    found: list[guard.KernelVerdict] = []
    for _ in range(2):
        guard.verdicts.clear()
        router(x)
        found.extend(guard.verdicts.values())
    return found


def waits() -> str:
    """What torch says of a step that waits for the device; empty if none does."""
    recipe = load_recipe("demo/l2r-sips", ["training.precision=bf16"])
    from l2r_lab.training.language import LanguageTask

    assert isinstance(recipe, LanguageRecipe)
    model = LanguageTask(recipe, print).build_model().to(DEVICE)
    batch = example_batch(recipe, model, 4, device=DEVICE)
    task: Any = SimpleNamespace(
        loss=LanguageTask.loss, micro_batches=lambda step, ranks: [batch, batch]
    )
    optimizer = build_optimizer(model, recipe.optimizer)
    step = TrainingStep(recipe, task, model, optimizer, Ranks(0, 1, DEVICE))
    for number in range(2):  # the first compiles, is compared, and makes the optimizer's state
        step.take(number, 1e-4, summarize=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step.take(2, 1e-4, summarize=False)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    step.check()
    return ""


def main() -> int:
    """Compare all, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    records = []
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16):
            for compiled, verdict in zip((False, True), compared(kind, dtype), strict=True):
                record = {"router": kind, "dtype": str(dtype), "compiled": compiled}
                records.append({**record, **verdict._asdict()})
                print(records[-1], flush=True)
    waiting = waits()
    print(f"a step {'waits: ' + waiting if waiting else 'waits for nothing'}")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"comparisons": records, "waits": waiting}, indent=1)
        (given.out / "guard.json").write_text(text + "\n")
    return int(bool(waiting) or any(record["reason"] for record in records))


if __name__ == "__main__":
    sys.exit(main())
