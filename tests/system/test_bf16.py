"""Training in bf16 end to end: products in bf16, everything that decides in fp32, the same loss."""

import json
import sys
from statistics import fmean

import pytest
from safetensors import safe_open

from l2r.files.folder import RunFolder
from scripts.proofs.bf16_against_fp32 import curve, main, run
from tests.processes import Running, on_ranks

pytestmark = pytest.mark.slow("a whole training")

EXPECTED = {
    "expert products": ["bfloat16"],
    "linear layers": ["bfloat16"],
    "router logits": ["float32"],
    "router losses": ["float32"],
    "statistics": ["float32"],
}
RECIPES = ["demo/l2r-sips", "demo-vision/l2r-sips"]


@pytest.fixture(scope="module")
def data(text_folder, tiny_changes):
    """Changes per recipe that keep its data small; tiny_changes sets the cache."""
    assert tiny_changes
    corpus = ["data.vocab_size=300", "data.characters_per_domain=30000"]
    return {RECIPES[0]: [f"data.corpus={text_folder}", *corpus], RECIPES[1]: []}


def assert_saved_in_fp32(folder):
    """Weights and optimizer slots; autocast casts copies."""
    checkpoint = RunFolder(folder).complete_checkpoints()[-1]
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            slices = {name: shard.get_slice(name).get_dtype() for name in shard.keys()}  # noqa: SIM118
        kinds = {kind for name, kind in slices.items() if name.startswith(("model.", "optimizer."))}
        assert kinds <= {"F32"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_thirty_steps_in_bf16_stay_within_the_spread_of_seeds(recipe, data, tmp_path):
    """The mean loss of the last ten steps; other seeds are other weights and another order."""
    means = {}
    for name, precision, seed in (("bf16", "bf16", 0), *((s, "fp32", s) for s in range(3))):
        changes = [*data[recipe], f"seed={seed}", "training.micro_batch=8"]
        dtypes = run(recipe, precision, "ddp", 30, changes, tmp_path / str(name))
        if precision == "bf16":
            assert dtypes == EXPECTED
        means[name] = fmean(curve(tmp_path / str(name))[-10:])
    seeds = [means[seed] for seed in range(3)]
    assert abs(means["bf16"] - means[0]) < max(seeds) - min(seeds)
    assert_saved_in_fp32(tmp_path / "bf16")


def called(main, arguments):
    sys.argv = ["bf16_against_fp32", *arguments]
    main()


@pytest.mark.parametrize(("recipe", "parallel"), [(RECIPES[0], "ddp"), (RECIPES[1], "fsdp2")])
def test_two_ranks_train_in_bf16_with_accumulation(recipe, parallel, data, tmp_path):
    arguments = [recipe, "--parallel", parallel, "--precisions", "bf16", "--steps", "1"]
    # two micro-batches of one row on each rank: products in bf16 are slow on a CPU
    changes = [*data[recipe], "training.global_batch=4", "training.micro_batch=1"]
    arguments += ["--out", str(tmp_path), *changes]
    on_ranks(2, tmp_path / "output", Running, called, main, arguments)
    assert json.loads((tmp_path / "dtypes.json").read_text()) == {"bf16": EXPECTED}
    assert_saved_in_fp32(tmp_path / "bf16")
    run(recipe, "fp32", "ddp", 1, changes, tmp_path / "alone")
    # the same weights and batch: the loss differs by the rounding of bf16 products, 2**-8 of it
    assert curve(tmp_path / "bf16")[0] == pytest.approx(curve(tmp_path / "alone")[0], rel=2**-8)
