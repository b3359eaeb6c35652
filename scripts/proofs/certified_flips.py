"""Decisions that are certified not to change elsewhere, over many: none may change.

    python scripts/proofs/certified_flips.py runs/demo/linear runs/demo/l2r_sips --rows 96

Each checkpoint reads held-out text in float32, in bf16 and with int8 and fp8 weights. A row per
checkpoint and arithmetic: decisions, how many changed, how many are certified, and how many of
these changed. Exit code 1 if any did.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from l2r.analysis.inputs import open_subject
from l2r.analysis.routes.arithmetic import in_other_arithmetic
from l2r.analysis.routes.mismatch import Comparison
from l2r.analysis.routes.model_reading import read_routing
from l2r.hf.checkpoints.placement import Placement
from l2r.runs.mismatch import ARITHMETICS


def main() -> None:
    """Parse, run, print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--rows", type=int, default=96, help="of 256 tokens")
    parser.add_argument("--arithmetics", default=",".join(ARITHMETICS))
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for checkpoint in options.checkpoints:
        subject = open_subject(
            checkpoint, None, placement=Placement("float32"), instances=options.rows, length=256,
            report=print,
        )  # fmt: skip
        for name in options.arithmetics.split(","):
            rows.append({"router": Path(checkpoint).name, "against": name, **count(subject, name)})
            print(" | ".join(map(str, rows[-1].values())), flush=True)
    total = {key: sum(row[key] for row in rows) for key in rows[0] if type(rows[0][key]) is int}
    print(f"in all: {total}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, "total": total}, indent=1) + "\n")
    sys.exit(total["certified_changed"] > 0)


def count(subject: Any, name: str) -> dict[str, int]:
    """Decisions of one checkpoint against one arithmetic."""
    other = in_other_arithmetic(subject.model, name)
    comparison = Comparison(subject.model, other)
    sums = dict.fromkeys(("decisions", "changed", "certified", "certified_changed"), 0)
    for batch in subject.batches(8, subject.device):
        first, second = (
            read_routing(model, batch["input_ids"]) for model in (subject.model, other)
        )
        _, held = comparison.changes(first, second)
        sets = [
            torch.from_numpy(r.routes.experts.astype("int64")).sort(-1)[0] for r in (first, second)
        ]
        changed = (sets[0] != sets[1]).any(-1).T
        certified = held == 1
        for key, value in (
            ("decisions", torch.ones_like(changed)),
            ("changed", changed),
            ("certified", certified),
            ("certified_changed", certified & changed),
        ):
            sums[key] += int(value.sum())
    return sums


if __name__ == "__main__":
    main()
