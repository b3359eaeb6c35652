"""What DeepSpeed's gates give as l_aux, for the page; a training adds it as it likes."""

import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed has an environment of its own: make engines")

from deepspeed.moe.sharded_moe import TopKGate

from scripts.others.coefficients import references
from scripts.others.coefficients.batch import COEFFICIENT, Added
from scripts.others.coefficients.measure import Loss, measure, write

pytestmark = pytest.mark.filterwarnings("ignore")
FIRST = {"balance_variant": "tutel"}
# top1gating, top2gating and topkgating, by k
GATES = {
    1: (references.gshard, "L", FIRST),
    2: (references.gshard, "L", FIRST),
    4: (references.over_k, "L / k", {}),
}


def balance(x, weights, top_k, mask):
    """The sum over layers, as Megatron-DeepSpeed adds it; used_token reaches top-1 alone."""
    _, experts, width = weights.shape
    gates = [TopKGate(width, experts, k=top_k, min_capacity=0).train() for _ in weights]
    for gate, weight in zip(gates, weights, strict=True):
        with torch.no_grad():
            gate.wg.weight.copy_(weight)
    used = {} if mask is None or top_k > 1 else {"used_token": mask.flatten().long()}
    torch.manual_seed(0)
    found = COEFFICIENT * sum(gate(x.flatten(0, 1), **used)[0] for gate in gates)
    found.backward()
    return Added(float(found.detach()), torch.stack([gate.wg.weight.grad for gate in gates]))


def test_coefficients():
    names = {1: "top-1", 2: "top-2", 4: "top-k"}
    rows = [
        measure(
            Loss(
                f"DeepSpeed: `l_aux`, {names[top_k]}",
                balance,
                reference,
                factor,
                here,
                sums_layers=True,
                top_k=top_k,
                other_top_k=3 if top_k == 4 else top_k,
            )
        )
        for top_k, (reference, factor, here) in GATES.items()
    ]
    write(Path(sys.prefix).name, metadata.version("deepspeed"), rows)
