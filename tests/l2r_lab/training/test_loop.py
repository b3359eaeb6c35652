"""The loop: exact resume, accumulation, NaN, refused folders. Tiny model, real text."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from l2r.files.folder import RunFolder
from l2r.functional import losses
from l2r.hf.checkpoints.pretrained import load_pretrained
from l2r_lab.training import loop, objective
from l2r_lab.training.checkpoint import load_weights
from l2r_lab.training.health import NonFiniteError
from l2r_lab.training.language import LanguageTask
from l2r_lab.training.recipes.load import load_recipe
from l2r_lab.training.step import TrainingStep

# Weights after six steps of Adam at the rate 2e-3. Some have no gradient but rounding (the bias of
# the keys), which Adam scales up: a hundredth of what the steps may move them. A wrong mean or
# statistic moves weights by as much as the steps do.
SAME = 1e-2 * 6 * 2e-3
ORDER = 256 * 2**-24  # a mean over 256 tokens in fp32, summed in another order


def run(folder, changes, *extra, recipe="demo/l2r-sips", **options):
    changed = load_recipe(recipe, [*changes, *extra])
    return loop.train(changed, folder, show_progress=False, **options)


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model" / "model.safetensors")


def same_bits(first, second) -> bool:
    one, two = weights(first), weights(second)
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def records(folder):
    """metrics.jsonl without the speed, which no two runs share."""
    return [
        {k: v for k, v in r.items() if k != "per_second"} for r in RunFolder(folder).read_metrics()
    ]


@pytest.fixture(scope="module")
def unbroken(tiny_changes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    result = run(folder, tiny_changes)
    assert result.finished and result.step == 6
    return folder


def test_a_run_writes_the_documented_folder(unbroken):
    folder = RunFolder(unbroken)
    assert folder.is_run() and (folder.model / "config.json").is_file()
    assert (folder.model / "tokenizer.json").is_file()
    facts = folder.read_json(folder.environment)
    assert facts["router"] == "l2r_sips" and facts["moe_layers"] == 2
    assert [r["step"] for r in folder.read_metrics("train")] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in folder.read_metrics("validation")] == [3, 6]
    train = folder.read_metrics("train")[0]
    assert train["tokens"] == 8 * 32 and len(train["load_entropy"]) == 2
    assert {"ce", "balance", "z", "lr", "grad_norm", "max_over_mean", "dead_experts"} <= set(train)
    assert {"ce/animals", "ce/numbers", "ce/mean"} <= set(folder.read_metrics("validation")[0])
    assert [p.name for p in folder.complete_checkpoints()] == ["step-00000004", "step-00000006"]


def test_checkpoints_nearest_to_tokens_are_kept_by_the_recipe(tiny_changes, tmp_path):
    """256 tokens a step: 600 are nearest to step 2, 1,000 to step 4; step 6 is the newest."""
    options = ("checkpoint.every=1", "checkpoint.keep=1", "checkpoint.keep_nearest=[600,1000]")

    def dying(step):
        if step == 3:  # the choice goes on in a run that is resumed
            raise RuntimeError("the machine is gone")

    with pytest.raises(RuntimeError, match="gone"):
        run(tmp_path, tiny_changes, *options, on_step=dying)
    run(tmp_path, tiny_changes, *options)
    kept = [folder.name for folder in RunFolder(tmp_path).complete_checkpoints()]
    assert kept == ["step-00000002", "step-00000004", "step-00000006"]
    with pytest.raises(ValueError, match=r"checkpoint\.keep_nearest"):
        run(tmp_path / "bad", tiny_changes, "checkpoint.keep_nearest=[0]")


def test_the_weights_of_a_checkpoint_load_alone(unbroken):
    model = load_pretrained(unbroken)
    final = {name: value.clone() for name, value in model.state_dict().items()}
    for value in model.parameters():
        torch.nn.init.zeros_(value)
    (*_, last) = RunFolder(unbroken).complete_checkpoints()
    assert load_weights(last, model) == 6
    assert all(torch.equal(value, final[name]) for name, value in model.state_dict().items())


def test_training_learns(tiny_changes, tmp_path):
    run(tmp_path / "run", tiny_changes, "training.steps=40", "optimizer.lr=0.01")
    losses = [r["ce"] for r in RunFolder(tmp_path / "run").read_metrics("train")]
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.parametrize("deaths", [(1,), (3, 5), (5, 5, 4)])
def test_a_run_that_dies_resumes_to_the_same_bits(deaths, unbroken, tiny_changes, tmp_path):
    """Also when it dies again after it was resumed: each time it begins at its checkpoint."""
    for number in deaths:

        def dying(step, number=number):
            if step == number:
                raise RuntimeError("the machine is gone")

        with pytest.raises(RuntimeError, match="gone"):
            run(tmp_path / "run", tiny_changes, on_step=dying)
    assert run(tmp_path / "run", tiny_changes).finished
    assert same_bits(unbroken, tmp_path / "run")
    assert records(unbroken) == records(tmp_path / "run")


def test_a_resumed_run_draws_the_random_numbers_of_an_unbroken_one(
    tiny_changes, tmp_path, monkeypatch
):
    """The packaged models draw none in training; one with dropout would, as this loss does."""
    loss = LanguageTask.loss

    def noisy(*given, **options):
        return loss(*given, **options) * (1 + torch.rand(()))

    def dying(step):
        if step == 3:
            raise RuntimeError("the machine is gone")

    monkeypatch.setattr(LanguageTask, "loss", staticmethod(noisy))
    run(tmp_path / "unbroken", tiny_changes)
    with pytest.raises(RuntimeError, match="gone"):
        run(tmp_path / "run", tiny_changes, on_step=dying)
    run(tmp_path / "run", tiny_changes)
    assert same_bits(tmp_path / "unbroken", tmp_path / "run")
    losses = [r["ce"] for r in records(tmp_path / "run") if r["kind"] == "train"]
    assert losses == [r["ce"] for r in records(tmp_path / "unbroken") if r["kind"] == "train"]
    assert len(losses) == 6


def test_the_rate_rises_to_its_peak_and_falls_to_its_end(unbroken):
    """512 of 1,536 tokens of warmup from a tenth, then half a cosine to a tenth; 256 a step."""
    peak, root = 2e-3, 0.5**0.5
    # A share s of the way from a tenth to the peak is 0.1 + 0.9 s.
    shares = [0, 1 / 2, 1, (1 + root) / 2, 1 / 2, (1 - root) / 2]
    rates = [r["lr"] for r in RunFolder(unbroken).read_metrics("train")]
    assert rates == pytest.approx([peak * (0.1 + 0.9 * share) for share in shares], rel=1e-9)


def every_loss(folder):
    """Number of steps and sum of their losses in the means, in order."""
    return [
        (r["steps"], r["steps"] * r["ce"]) for r in RunFolder(folder).read_metrics("train_mean")
    ]


def test_the_loss_of_every_step_is_recorded_though_few_steps_are_logged(
    unbroken, tiny_changes, tmp_path
):
    run(tmp_path / "run", tiny_changes, "training.log_every=3", "checkpoint.every=4")
    losses = [r["ce"] for r in RunFolder(unbroken).read_metrics("train")]
    steps, sums = zip(*every_loss(tmp_path / "run"), strict=True)
    assert steps == (3, 1, 2)  # a checkpoint closes a mean, so that a resumed run adds to none
    assert sums == pytest.approx([sum(losses[:3]), losses[3], sum(losses[4:])], rel=1e-12)


def test_a_run_stopped_between_records_loses_no_loss(unbroken, tiny_changes, tmp_path, monkeypatch):
    changes = [*tiny_changes, "training.log_every=6", "checkpoint.every=0"]
    take = TrainingStep.take

    def stopping(self, number, *given, **options):
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(self, number, *given, **options)

    monkeypatch.setattr(TrainingStep, "take", stopping)
    assert not run(tmp_path / "run", changes).finished
    monkeypatch.undo()
    assert run(tmp_path / "run", changes).finished
    losses = [r["ce"] for r in RunFolder(unbroken).read_metrics("train")]
    steps, sums = zip(*every_loss(tmp_path / "run"), strict=True)
    assert steps == (2, 4) and sum(sums) == pytest.approx(sum(losses), rel=1e-12)


def test_every_token_of_the_vocabulary_is_trained(unbroken, tiny_changes, tmp_path):
    """Rows are packed: no id stands for padding, nor did it in the model that training starts from.

    Models of version 0.2.0 and before have a row for padding, the second.
    """
    padded = load_pretrained(unbroken, pad_token_id=1)
    assert padded.get_input_embeddings().padding_idx == 1
    padded.save_pretrained(tmp_path / "padded")
    padded = tmp_path / "padded"
    for extra in ([], [f"model.init_from={padded}"]):
        task = LanguageTask(load_recipe("demo/l2r-sips", [*tiny_changes, *extra]), print)
        model = task.build_model()
        ids = torch.arange(model.config.vocab_size)[None]
        LanguageTask.loss(model, {"input_ids": ids}).backward()
        reached = model.get_input_embeddings().weight.grad.abs().sum(1) > 0
        assert reached[:-1].all()  # of the last token nothing is asked
        assert model.config.pad_token_id is None


def test_a_finished_run_does_nothing_more(unbroken, tiny_changes):
    before = (unbroken / "model" / "model.safetensors").stat().st_mtime_ns
    assert run(unbroken, tiny_changes).finished
    assert (unbroken / "model" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.slow("several trainings")
def test_accumulation_does_not_change_training_with_step_statistics(tiny_changes, tmp_path):
    scope = "losses.balance_scope=step"
    run(tmp_path / "whole", tiny_changes, scope)
    run(tmp_path / "parts", tiny_changes, scope, "training.micro_batch=2")
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    for name in whole:
        torch.testing.assert_close(whole[name], parts[name], atol=SAME, rtol=0)
    first, second = (RunFolder(tmp_path / n).read_metrics("train") for n in ("whole", "parts"))
    for one, two in zip(first, second, strict=True):
        for name in ("ce", "balance", "z", "grad_norm"):  # AdamW hides the scale of a gradient
            assert one[name] == pytest.approx(two[name], rel=ORDER)


@pytest.mark.parametrize("scope", ["microbatch", "step"])
def test_loads_on_record_are_of_the_whole_step(scope, tiny_changes, tmp_path):
    """Rows of a step are the same however it is cut, and so are the experts they go to."""
    one = [*tiny_changes, "training.steps=1", f"losses.balance_scope={scope}"]
    records = []
    for rows in (8, 1):
        run(tmp_path / str(rows), one, f"training.micro_batch={rows}")
        records += RunFolder(tmp_path / str(rows)).read_metrics("train")
    whole, parts = records
    assert parts["dead_experts"] == whole["dead_experts"]
    for name in ("load_entropy", "max_over_mean"):
        assert parts[name] == pytest.approx(whole[name], rel=ORDER)


def test_micro_batch_statistics_are_averaged_not_summed(tiny_changes, tmp_path):
    run(tmp_path / "parts", tiny_changes, "training.micro_batch=2", "training.steps=1")
    record = RunFolder(tmp_path / "parts").read_metrics("train")[0]
    assert 2 <= record["balance"] < 8  # k = 2 at least, for each part too: a sum of 4 is above 8


@pytest.mark.parametrize(("variant", "per_layer"), [("paper", 1), ("tutel", 2)])
def test_experts_are_counted_once_per_layer_and_micro_batch(
    variant, per_layer, tiny_changes, tmp_path, monkeypatch
):
    """GShard's loss counts first choices, the log all of them."""
    calls = []
    for module in (losses, objective):
        count = module.expert_usage
        counted = lambda *a, count=count, **o: calls.append(1) or count(*a, **o)  # noqa: E731
        monkeypatch.setattr(module, "expert_usage", counted)
    changes = ["training.steps=1", "training.micro_batch=4", f"losses.balance_variant={variant}"]
    run(tmp_path / "run", tiny_changes, *changes)
    layers, micro_batches = 2, 2
    assert len(calls) == per_layer * layers * micro_batches


def test_constrained_anchors_keep_their_norm(tiny_changes, tmp_path):
    router = ["router.anchor_norm=1.5", "router.normalize_query=false"]
    run(tmp_path / "run", tiny_changes, *router, "optimizer.lr=0.01", recipe="demo/xmoe")
    anchors = [w for name, w in weights(tmp_path / "run").items() if name.endswith("anchors")]
    assert len(anchors) == 2
    for found in anchors:
        norms = found.norm(dim=-1)
        torch.testing.assert_close(norms, torch.full_like(norms, 1.5))


def test_a_router_larger_than_the_linear_one_says_so(tiny_changes, tmp_path):
    """Two layers of W_q [R, 32], a gain [32] and anchors [8, H, R], against [8, 32]."""
    lines = {}
    for heads in (1, 16):
        lines[heads] = []
        changes = ["training.steps=1", "router.rank=2", f"router.heads={heads}"]
        run(tmp_path / str(heads), tiny_changes, *changes, report=lines[heads].append)
    larger = "the routers have 704 parameters, more than the 512 of linear routers in their place"
    assert larger in lines[16]
    assert not any("parameters" in line for line in lines[1])


def test_routers_share_initial_weights_and_batches(tiny_changes, tmp_path):
    for recipe in ("demo/linear", "demo/l2r-sips"):
        run(tmp_path / recipe, tiny_changes, "optimizer.lr=1e-12", recipe=recipe)
    first, second = weights(tmp_path / "demo/linear"), weights(tmp_path / "demo/l2r-sips")
    shared = [name for name in first if ".gate." not in name]
    assert shared
    for name in shared:
        torch.testing.assert_close(first[name], second[name], atol=1e-6, rtol=0)


def test_activation_checkpointing_changes_nothing(unbroken, tiny_changes, tmp_path):
    run(tmp_path / "run", tiny_changes, "training.activation_checkpointing=true")
    one, two = weights(unbroken), weights(tmp_path / "run")
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=SAME, rtol=0)


def test_a_nan_stops_the_run_and_names_step_layer_and_checkpoint(
    tiny_changes, tmp_path, monkeypatch
):
    build = loop.build_task

    def poisoned(recipe, report):
        task = build(recipe, report)
        original = task.micro_batches

        def batches(step, ranks):
            if step == 3:
                with torch.no_grad():
                    trainer_model[0].model.layers[1].mlp.experts.down_proj[:, 0, 0] = float("inf")
            return original(step, ranks)

        task.micro_batches = batches
        return task

    trainer_model: list = []
    parallelize = loop.parallelize
    keep = lambda m, *a: trainer_model.append(m) or parallelize(m, *a)  # noqa: E731
    monkeypatch.setattr(loop, "parallelize", keep)
    monkeypatch.setattr(loop, "build_task", poisoned)
    with pytest.raises(NonFiniteError) as error:
        run(tmp_path / "run", tiny_changes)
    message = str(error.value)
    assert "step 3" in message and "layers.1.mlp.experts.down_proj" in message
    assert message.endswith("step-00000002")


def test_a_bad_step_found_later_has_changed_nothing(tiny_changes, tmp_path, monkeypatch):
    """No step waits for its loss: the weights stop before the first bad one, whatever follows."""
    held, build = [], loop.build_task

    def poisoned(recipe, report):
        task = build(recipe, report)
        loss, batches = task.loss, task.micro_batches

        def at(step, ranks):
            task.loss = lambda *given: loss(*given) * (float("inf") if step == 2 else 1)
            return batches(step, ranks)

        task.micro_batches = at
        return task

    def taken(self, step, *given, **options):
        held.append([p.detach().clone() for p in self.model.parameters()])
        return take(self, step, *given, **options)

    take = TrainingStep.take
    monkeypatch.setattr(TrainingStep, "take", taken)
    monkeypatch.setattr(loop, "build_task", poisoned)
    rare = ("training.log_every=6", "evaluation.every=0", "checkpoint.every=5")
    with pytest.raises(NonFiniteError, match="step 2: loss is inf; every module output is finite"):
        run(tmp_path / "run", tiny_changes, *rare)
    assert len(held) == 5  # found before the checkpoint, which is not written, nor is a record
    assert RunFolder(tmp_path / "run").read_metrics() == []
    assert RunFolder(tmp_path / "run").complete_checkpoints() == []
    for before, after in zip(held[2], held[4], strict=True):
        assert torch.equal(before, after)
    assert any(not torch.equal(a, b) for a, b in zip(held[1], held[2], strict=True))


def test_overflow_names_the_first_module(tiny_changes, tmp_path):
    with pytest.raises(NonFiniteError, match=r"step \d+: (loss|gradient norm) is"):
        run(tmp_path / "run", tiny_changes, "optimizer.lr=1e30", "optimizer.warmup=0")


def test_a_finished_run_without_checkpoints_is_not_trained_again(unbroken, tiny_changes, tmp_path):
    shutil.copytree(unbroken, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    result = run(tmp_path / "run", tiny_changes)
    assert result.finished and result.step == result.steps
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize("change", ["losses.bias_speed=0.01", "model.init_from=/nonexistent"])
def test_a_refused_setting_does_not_claim_the_folder(change, tiny_changes, tmp_path):
    with pytest.raises((ValueError, OSError)):
        run(tmp_path / "run", tiny_changes, change)
    assert run(tmp_path / "run", tiny_changes, "training.steps=1").finished


def test_another_recipe_in_the_same_folder_is_refused(unbroken, tiny_changes):
    with pytest.raises(ValueError, match="another recipe: its seed is 0, not 7; choose another"):
        run(unbroken, tiny_changes, "seed=7")
    with pytest.raises(ValueError, match=r"not 7 \(1 more differs\); choose another folder"):
        run(unbroken, tiny_changes, "seed=7", "optimizer.lr=0.5")


def test_a_folder_in_use_is_refused(tiny_changes, tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with folder.lock(), pytest.raises(ValueError, match="is in use by another run"):
        run(tmp_path / "run", tiny_changes)


@pytest.mark.parametrize("damage", ["truncate", "flip", "state", "missing"])
def test_a_damaged_checkpoint_is_named(damage, unbroken, tiny_changes, tmp_path):
    import shutil

    shutil.copytree(unbroken, tmp_path / "run")
    newest = RunFolder(tmp_path / "run").complete_checkpoints()[-1]
    shard = next(newest.glob("*.safetensors"))
    if damage == "truncate":
        shard.write_bytes(shard.read_bytes()[:500])
    elif damage == "flip":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 0x01
        shard.write_bytes(bytes(data))
    elif damage == "state":
        (newest / "state.json").write_text("{")
    else:
        shard.unlink()
    with pytest.raises(ValueError, match=f"checkpoint {newest} (cannot be loaded|has no readable)"):
        run(tmp_path / "run", tiny_changes)


def test_a_full_disk_keeps_the_last_good_checkpoint(unbroken, tiny_changes, tmp_path, monkeypatch):
    from l2r_lab.training import checkpoint

    save, calls = checkpoint.save, []

    def full(*args, **options):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return save(*args, **options)

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(OSError, match=r"cannot write checkpoint .*step-00000004: .*No space left"):
        run(tmp_path / "run", tiny_changes)
    assert [p.name for p in RunFolder(tmp_path / "run").complete_checkpoints()] == ["step-00000002"]
    monkeypatch.undo()
    run(tmp_path / "run", tiny_changes)
    assert same_bits(unbroken, tmp_path / "run")


def test_metrics_cut_by_a_crash_are_read_up_to_the_cut(unbroken, tmp_path):
    folder = RunFolder(tmp_path)
    lines = (unbroken / "metrics.jsonl").read_text().splitlines()
    folder.metrics.write_text("\n".join([*lines[:3], lines[3][:20]]))
    assert folder.read_metrics() == [json.loads(line) for line in lines[:3]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["training.micro_batch=3"], "global_batch must be a multiple of micro_batch"),
        (["training={steps: 5, tokens: 100}"], "exactly one of steps, tokens, epochs"),
        (["data.sequence_length=1000000"], "lower sequence_length"),
        (["data.corpus=/nonexistent"], "data folder must exist"),
        (["model.vocab_size=100"], r"model.vocab_size must be >= \d+, the tokenizer's; got 100"),
        (
            ["training={epochs: 3, global_batch: 100000, micro_batch: 1}"],
            "training.epochs needs global_batch <= .*; got 100000",
        ),
    ],
)
def test_bad_recipes_are_named(changes, message, tiny_changes, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", tiny_changes, *changes)
