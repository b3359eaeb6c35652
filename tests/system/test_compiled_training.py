"""Blocks under torch.compile train as plain ones do, in graphs that are made once."""

import json
from functools import partialmethod

import pytest
from torch import nn
from torch._dynamo.utils import counters

from l2r.files.folder import RunFolder
from l2r_lab.training import loop
from l2r_lab.training.recipes.load import load_recipe
from tests.processes import Running

pytestmark = pytest.mark.slow("a compiler")

SIZES = {
    "demo/l2r-sips": [],  # tiny_changes
    "demo-vision/l2r-sips": ["training.global_batch=8", "training.micro_batch=4"],
}
ROUNDING = 1024 * 2**-24  # a sum over 1,024 numbers in fp32, taken in another order


def train(recipe, changes, folder):
    """Three steps; the number of graphs after each, and of reasons to leave one."""
    nn.Module.compile = partialmethod(nn.Module.compile, backend="aot_eager")  # no compiler of C++
    seen = []

    def note(step):
        seen.append((counters["stats"]["unique_graphs"], len(counters["graph_break"])))

    changes = [*changes, "training.steps=3", "training.log_every=1", "evaluation.every=0"]
    loop.train(load_recipe(recipe, changes), folder, show_progress=False, on_step=note)
    (folder / "graphs.json").write_text(json.dumps(seen))


@pytest.mark.parametrize("recipe", SIZES)
def test_compiled_blocks_train_as_plain_ones(recipe, tiny_changes, tmp_path):
    changes = SIZES[recipe] or [*tiny_changes, "training.micro_batch=4"]
    for name in ("true", "false"):
        arguments = (recipe, [*changes, f"training.compile={name}"], tmp_path / name)
        Running(tmp_path / "output", train, *arguments).succeed()
    plain, compiled = (RunFolder(tmp_path / n).read_metrics("train") for n in ("false", "true"))
    for loss in ("ce", "balance", "z", "grad_norm"):
        assert compiled[0][loss] == pytest.approx(plain[0][loss], rel=ROUNDING)
    graphs = [json.loads((tmp_path / n / "graphs.json").read_text()) for n in ("true", "false")]
    assert graphs[1] == [[0, 0]] * 3
    assert graphs[0][1][0] > 0 and graphs[0][1] == graphs[0][2]  # none is made in a later step
    assert graphs[0][1][1] == 1  # the router, and nothing else, is left out


def test_compile_and_checkpointing_exclude_each_other():
    changes = ["training.compile=true", "training.activation_checkpointing=true"]
    with pytest.raises(ValueError, match=r"compile must be false with activation_checkpointing"):
        load_recipe("demo/l2r-sips", changes)
