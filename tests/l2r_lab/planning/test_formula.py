"""Peak memory: torch's simulation against a real step, the formula against the simulation."""

import importlib.util
from pathlib import Path

import pytest
import torch.distributed as dist

from l2r_lab.planning.cut import StepCut
from l2r_lab.planning.formula import formula
from l2r_lab.planning.simulate import simulate
from l2r_lab.planning.sizes import read_sizes
from l2r_lab.training.recipes.load import load_recipe
from tests.tiers import few

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "machines" / "plan_against_measured.py"
# One block and few words, but enough tokens that activations are most of the memory.
SMALL = ["model.num_hidden_layers=2", "data.vocab_size=512", "data.sequence_length=64"]
WITHIN = 0.1  # what the plan promises


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("plan_against_measured", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow("a simulated training")
def test_the_simulation_is_a_measured_training_step(script, tiny_changes):
    # Of so little text no tokenizer learns 300 words, and the model follows the tokenizer.
    longer = ["model.vocab_size=300", "data.sequence_length=128", "training.micro_batch=4"]
    changes = [*tiny_changes, *longer]
    recipe = load_recipe("demo/l2r-sips", changes)
    measured = script.allocated(recipe)
    assert measured > 2**20
    predicted = simulate(recipe, StepCut("ddp", 1, 8, 4, False)).peak
    assert predicted == pytest.approx(measured, rel=WITHIN)


@pytest.mark.parametrize(
    ("parallel", "gpus", "micro_batch", "checkpointing"),
    few(
        [
            ("ddp", 1, 16, False),
            ("ddp", 2, 4, True),
            ("fsdp2", 2, 8, False),
            ("fsdp2", 4, 2, True),
            ("ep", 8, 2, False),
        ],
        [("ddp", 1, 16, False)],
        "a simulated training",
    ),
)
def test_the_formula_is_the_simulation(parallel, gpus, micro_batch, checkpointing):
    recipe = load_recipe("demo/l2r-sips", SMALL)
    cut = StepCut(parallel, gpus, 16, micro_batch, checkpointing)
    expected, sizes = simulate(recipe, cut), read_sizes(recipe)
    found = formula(sizes, cut)
    assert found.peak == pytest.approx(expected.peak, rel=WITHIN)
    for part in ("weights", "optimizer", "buckets"):  # buffers and steps of Adam aside
        assert getattr(found, part) == pytest.approx(getattr(expected, part), rel=1e-3)
    assert not dist.is_initialized()


UNEVEN = ["model.num_labels=10", "model.num_hidden_layers=6", "model.num_experts=32"]


WHERE = pytest.mark.parametrize("moe_layers", ["[5]", "[0]", "[4,5]", "[1,3,5]"])
UNEVENLY = StepCut("fsdp2", 8, 64, 4, False)


def uneven(moe_layers):
    return load_recipe("demo-vision/l2r-sips", [*UNEVEN, f"model.moe_layers={moe_layers}"])


@pytest.mark.slow("a simulated training")
@WHERE
def test_the_plan_of_uneven_blocks_is_their_simulation(moe_layers):
    recipe = uneven(moe_layers)
    planned = formula(read_sizes(recipe), UNEVENLY).peak
    assert planned == pytest.approx(simulate(recipe, UNEVENLY).peak, rel=WITHIN)


@WHERE
def test_the_largest_blocks_are_planned_and_not_their_mean(moe_layers):
    sizes = read_sizes(uneven(moe_layers))
    dense, largest = (pick(block.numbers for block in sizes.blocks) for pick in (min, max))
    assert sizes.expert_numbers > 0.5 * largest * len(moe_layers.split(","))
    assert formula(sizes, UNEVENLY).gathered >= 4 * (sizes.around.numbers + largest + dense)


def test_fewer_experts_than_ranks_are_padded_to_a_row_for_each():
    """Fsdp2 splits rows: of 2 experts on 8 ranks the first holds one, and 8 rows travel."""
    two = ["model.num_experts=2", "model.num_experts_per_tok=1"]
    recipe = load_recipe("demo/l2r-sips", [*SMALL, *two])
    cut, sizes = StepCut("fsdp2", 8, 16, 2, False), read_sizes(recipe)
    found, expected = formula(sizes, cut), simulate(recipe, cut)
    assert found.weights == pytest.approx(expected.weights, rel=1e-3)
    assert found.peak == pytest.approx(expected.peak, rel=WITHIN)
    assert sizes.blocks[0].padded(8) > 4 * sizes.blocks[0].expert_numbers


def test_checkpointing_holds_the_casts_of_one_block_at_a_time():
    """Where the head is the peak, one more block costs its states and its input, half or not."""
    for precision in ("fp32", "bf16"):
        changes = ["data.vocab_size=8192", f"training.precision={precision}"]
        pair = [
            read_sizes(load_recipe("demo/l2r-sips", [*changes, f"model.num_hidden_layers={n}"]))
            for n in (2, 3)
        ]
        cut = StepCut("ddp", 1, 64, 64, True)
        found = [formula(sizes, cut) for sizes in pair]
        assert all(memory.logits > memory.peak / 2 for memory in found)
        states = 3 * (found[1].weights - found[0].weights)
        kept = 4 * pair[0].hidden * 64 * pair[0].tokens
        assert found[1].peak - found[0].peak == pytest.approx(states + kept, rel=1e-9)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_moving_average_is_one_more_copy_of_the_weights(parallel):
    plain = read_sizes(load_recipe("demo-vision/l2r-sips"))
    averaged = read_sizes(load_recipe("demo-vision/l2r-sips", ["training.ema_decay=0.99"]))
    cut = StepCut(parallel, 2, 16, 4, False)
    more = formula(averaged, cut).peak - formula(plain, cut).peak
    assert more == pytest.approx(4 * plain.numbers / (2 if parallel == "fsdp2" else 1), rel=0.01)


@pytest.mark.slow("a simulated training")
def test_logits_in_chunks_are_planned():
    changes = [*SMALL, "data.vocab_size=4096"]
    peaks = []
    for chunk in ("training.loss_chunk=null", "training.loss_chunk=64"):
        recipe, cut = (
            load_recipe("demo/l2r-sips", [*changes, chunk]),
            StepCut("ddp", 1, 16, 16, False),
        )
        found, expected = formula(read_sizes(recipe), cut), simulate(recipe, cut)
        assert found.peak == pytest.approx(expected.peak, rel=WITHIN)
        peaks.append(expected.peak)
        assert found.logits == 3 * 4 * 4096 * (64 if recipe.training.loss_chunk else 16 * 64)
    assert peaks[0] - peaks[1] > 4 * 4096 * (16 * 64 - 64)  # a whole one at least is not there


@pytest.mark.slow("a simulated training")
@pytest.mark.parametrize(("parallel", "gpus"), [("ddp", 1), ("ddp", 2), ("fsdp2", 2)])
def test_a_moving_average_takes_the_weights_once_more(parallel, gpus):
    cut = StepCut(parallel, gpus, 16, 8, False)
    recipes = [load_recipe("demo/l2r-sips", [*SMALL, f"training.ema_decay={d}"]) for d in (0, 0.9)]
    without, with_average = (formula(read_sizes(recipe), cut) for recipe in recipes)
    weights = 4 * read_sizes(recipes[0]).numbers / (gpus if parallel == "fsdp2" else 1)
    assert without.weights == weights and with_average.weights == 2 * weights
    assert with_average.peak - without.peak == weights
    assert with_average.optimizer == without.optimizer == 2 * weights
    expected = simulate(recipes[1], cut)
    assert with_average.peak == pytest.approx(expected.peak, rel=WITHIN)
    assert with_average.weights == pytest.approx(expected.weights, rel=1e-3)


@pytest.mark.slow("a simulated training")
def test_a_vision_recipe_in_bf16_is_planned_too():
    recipe = load_recipe("demo-vision/l2r-sips", ["training.precision=bf16", "model.num_labels=10"])
    cut = StepCut("ddp", 1, 64, 64, False)
    found, expected = formula(read_sizes(recipe), cut).peak, simulate(recipe, cut).peak
    assert found == pytest.approx(expected, rel=WITHIN)


def test_checkpointing_keeps_one_tensor_per_block_and_imbalance_grows_what_experts_receive():
    sizes = read_sizes(load_recipe("demo/l2r-sips", SMALL))
    kept = [formula(sizes, StepCut("ddp", 1, 16, 16, ck)).activations for ck in (False, True)]
    assert kept[1] == 2 * 16 * 64 * 128 * 4 < kept[0]
    received = [
        formula(sizes, StepCut("ep", 8, 16, 2, False, imbalance)).dispatch
        for imbalance in (1.0, 2.0)
    ]
    assert received[1] == 1.5 * received[0]  # rows that arrive doubled, rows that return did not


def test_a_process_group_is_left_even_where_the_simulation_fails(monkeypatch):
    recipe = load_recipe("demo/l2r-sips", SMALL)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no step")

    monkeypatch.setattr("l2r_lab.planning.simulate._backward", fail)
    with pytest.raises(RuntimeError, match="no step"):
        simulate(recipe, StepCut("fsdp2", 2, 16, 8, False))
    assert not dist.is_initialized()
