"""Two gloo processes give what one process gives."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from l2r.files.folder import RunFolder
from l2r_lab.training import loop
from l2r_lab.training.health import NonFiniteError
from l2r_lab.training.language import LanguageTask
from l2r_lab.training.ranks import join_ranks
from l2r_lab.training.recipes.load import load_recipe
from tests.processes import Running, command, in_turn, on_ranks

# Weights after six steps of Adam at the rate 2e-3. Some have no gradient but rounding (the bias of
# the keys), which Adam scales up: a hundredth of what the steps may move them. A wrong mean or
# statistic moves weights by as much as the steps do.
SAME = 1e-2 * 6 * 2e-3
ORDER = 256 * 2**-24  # a mean over 256 tokens in fp32, summed in another order


def launch(ranks, folder, changes, *extra):
    train = ["train", "demo/l2r-sips", *changes, "losses.balance_scope=step"]
    train += ["training.micro_batch=4", *extra, "--out", folder]
    output = folder.parent / "output"
    on_ranks(ranks, output, command, *train)
    for rank in range(ranks):
        assert "FutureWarning" not in (output / str(rank) / "err.txt").read_text()
        said = (output / str(rank) / "out.txt").read_text()
        assert said.count("trained ") == (rank == 0)
    return RunFolder(folder)


def assert_same(first, second):
    one, two = (load_file(r.model / "model.safetensors") for r in (first, second))
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=SAME, rtol=0)
    for a, b in zip(first.read_metrics("train"), second.read_metrics("train"), strict=True):
        for loss in ("ce", "balance", "z", "grad_norm"):
            assert a[loss] == pytest.approx(b[loss], rel=ORDER)
        for load in ("load_entropy", "max_over_mean", "dead_experts"):
            assert a[load] == pytest.approx(b[load], rel=ORDER)


@pytest.mark.slow("two processes")
@pytest.mark.parametrize("norm", ["rmsnorm", "batchnorm"])
def test_two_ranks_equal_one_under_ddp_and_fsdp2(norm, tiny_changes, tmp_path):
    query_norm = f"router.query_norm={norm}"
    whole = "training.micro_batch=8"  # BatchNorm sees the batch of all ranks, not of a part
    one = launch(1, tmp_path / "one", tiny_changes, query_norm, whole)
    for parallel in ("ddp", "fsdp2"):
        form = (f"training.parallel={parallel}", "training.loss_chunk=40")
        two = launch(2, tmp_path / parallel, tiny_changes, query_norm, *form)
        assert_same(one, two)


@pytest.mark.slow("two processes")
def test_the_same_ranks_train_twice(tiny_changes, tmp_path):
    """A script under torchrun may train one model after another."""
    train = ["train", "demo/l2r-sips", *tiny_changes, "training.steps=1", "training.micro_batch=4"]
    commands = [[*train, "--out", str(tmp_path / name)] for name in ("first", "second")]
    on_ranks(2, tmp_path / "output", Running, in_turn, commands)
    assert_same(*(RunFolder(tmp_path / name) for name in ("first", "second")))


def models_that_outlive_their_group(rounds):
    """What a run leaves that ends with an error: its traceback holds the model under DDP."""
    for _ in range(rounds):
        with join_ranks() as ranks:
            model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
            model(torch.ones(2, 4)).sum().backward()
            ranks.least((ranks.rank, "a cause"))
        del model


def test_a_model_that_outlives_its_group_is_freed(tmp_path):
    """DDP frees the group under the GIL, for which a thread of gloo may wait that it waits for."""
    on_ranks(2, tmp_path / "output", Running, models_that_outlive_their_group, 20)


@pytest.mark.slow("two processes")
def test_a_ddp_checkpoint_goes_on_under_fsdp2(tiny_changes, tmp_path):
    """Three ways to the same weights: unbroken, and DDP for 2 steps then FSDP2.

    With a learned temperature, one number a layer, which FSDP2 can only hold as a vector.
    """
    tiny_changes = [*tiny_changes, "router.learn_temperature=true"]
    one = launch(1, tmp_path / "one", tiny_changes)
    broken = launch(2, tmp_path / "two", tiny_changes)
    for checkpoint in broken.complete_checkpoints()[1:]:
        for path in checkpoint.iterdir():
            path.unlink()
        checkpoint.rmdir()
    (broken.model / "config.json").unlink()
    recipe = broken.recipe.read_text().replace("parallel: ddp", "parallel: fsdp2")
    broken.recipe.write_text(recipe)
    for path in broken.model.iterdir():
        path.unlink()
    broken.model.rmdir()
    two = launch(2, tmp_path / "two", tiny_changes, "training.parallel=fsdp2")
    assert_same(one, two)


def killed_before(step, folder, changes):
    """A sharded run whose ranks are killed before a step; None lets it end."""
    kill = lambda number: number == step and os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    recipe = load_recipe("demo/l2r-sips", [*changes, *SHARDED])
    loop.train(recipe, folder, show_progress=False, on_step=kill)


SHARDED = ["training.parallel=fsdp2", "training.micro_batch=4", "training.ema_decay=0.9"]


@pytest.mark.slow("two processes, four times")
def test_a_sharded_run_that_is_killed_twice_ends_with_the_same_bytes(tiny_changes, tmp_path):
    """Before steps 3 and 5, of six; there is a checkpoint every two."""
    run = (Running, killed_before)
    on_ranks(2, tmp_path / "output", *run, None, tmp_path / "whole", tiny_changes)
    for step in (3, 5):
        with pytest.raises(AssertionError, match=f"rank 0: -{signal.SIGKILL:d}"):
            on_ranks(2, tmp_path / str(step), *run, step, tmp_path / "killed", tiny_changes)
    on_ranks(2, tmp_path / "last", *run, None, tmp_path / "killed", tiny_changes)
    whole, killed = (RunFolder(tmp_path / name) for name in ("whole", "killed"))
    for folder in ("model", "averaged_model"):
        one, two = (getattr(r, folder) / "model.safetensors" for r in (whole, killed))
        assert one.read_bytes() == two.read_bytes()
    numbers = [[{**r, "per_second": 0} for r in f.read_metrics("train")] for f in (whole, killed)]
    assert numbers[0] == numbers[1] and len(numbers[0]) == 6


def overflow_on_the_second_rank(folder, changes):
    """A run whose loss is infinite at step 2, on one rank; print how it ends."""
    loss, batches, at = LanguageTask.loss, LanguageTask.micro_batches, [0]

    def noted(task, step, ranks):
        at[0] = step
        return batches(task, step, ranks)

    def infinite(*given):
        bad = at[0] == 2 and os.environ["RANK"] == "1"
        return loss(*given) * (float("inf") if bad else 1.0)

    LanguageTask.micro_batches, LanguageTask.loss = noted, staticmethod(infinite)
    try:
        loop.train(load_recipe("demo/l2r-sips", changes), folder, show_progress=False)
    except NonFiniteError as error:
        print(error)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_a_loss_that_overflows_on_one_rank_is_explained_on_all(parallel, tiny_changes, tmp_path):
    """None waits for one that has left, and none does a forward that the others do not share."""
    cut = [f"training.parallel={parallel}", "training.micro_batch=2", "training.log_every=4"]
    changes = [*tiny_changes, *cut, "evaluation.every=0", "checkpoint.every=0"]
    output = tmp_path / "output"
    given = (str(tmp_path / "run"), changes)
    on_ranks(2, output, Running, overflow_on_the_second_rank, *given)
    for rank in range(2):
        said = (output / str(rank) / "out.txt").read_text().strip()
        assert said == "step 2: loss is inf; every module output is finite, the loss is not"
