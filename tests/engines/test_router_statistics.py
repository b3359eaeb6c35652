"""Router statistics in the logs of transformers' Trainer, and of Lightning's by its hooks."""

import types

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from l2r.analysis.diagnostics.step_statistics import NUMBERS, router_statistics
from l2r.engines.trainer import add_router_losses, add_router_statistics
from l2r.engines.trainer.lightning import RouterHooks, router_statistics_callback
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import router_sites
from tests.engines.test_hf_trainer import Arguments, Trainer, olmoe, swapped_mixtral, texts
from tests.hf.families import tiny_model


class Writer(TrainerCallback):
    """TensorBoard's callback as others see it, and what a tracker finds in the logs."""

    def __init__(self):
        self.logs, self.images = [], []
        self.tb_writer = types.SimpleNamespace(add_image=lambda *args: self.images.append(args))

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def train(model, tmp_path, *, before=lambda trainer: None, every=None, **options):
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "logging_steps": 2,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    }
    arguments = Arguments(output_dir=str(tmp_path), **{**settings, **options})
    writer = Writer()
    trainer = Trainer(model, arguments, train_dataset=texts(), callbacks=[writer])
    before(trainer)
    add_router_statistics(trainer, every=every)
    trainer.train()
    return trainer, writer


@pytest.mark.slow("trainings by another library")
@pytest.mark.parametrize(
    "build",
    [olmoe, swapped_mixtral, lambda: tiny_model(FAMILIES["mixtral"]).train()],
    ids=["own", "swapped", "stock"],
)
def test_trackers_get_flat_numbers_and_a_picture_in_logged_steps_alone(build, tmp_path):
    model = build()
    steps = []
    for site in router_sites(model):
        site.router.register_forward_hook(lambda m, a, out: steps.append(len(m._forward_hooks)))
    trainer, writer = train(model, tmp_path)
    logged = [log for log in writer.logs if "loss" in log]
    assert len(logged) == 2
    layers = len(router_sites(model))
    for log, kept in zip(logged, trainer.state.log_history, strict=False):
        numbers = {name: value for name, value in log.items() if name.startswith("router/")}
        assert len(numbers) == len(NUMBERS) * (1 + layers)
        assert all(type(value) is float for value in numbers.values())
        assert kept["router/load_entropy/layer-1"] == log["router/load_entropy/layer-1"]
    assert [(name, image.shape[0], step) for name, image, step in writer.images] == [
        ("router/load", 3, 2), ("router/load", 3, 4)
    ]  # fmt: skip
    # Two micro-batches for each step: one hook more in every second step, none after the end.
    assert len(set(steps)) == 2
    assert all(len(s.router._forward_hooks) == min(steps) for s in router_sites(model))


def test_the_numbers_are_of_all_micro_batches_and_of_real_tokens(tmp_path):
    """Without learning, the logged step is all four rows; padding is in their masks."""
    model = olmoe()
    _, writer = train(model, tmp_path, max_steps=1, logging_steps=1, learning_rate=0.0)
    data = texts()
    batch = {name: torch.stack([row[name] for row in data]) for name in data[0]}
    with torch.no_grad():
        output = model.train()(**batch, output_router_logits=True)
    trained = batch["attention_mask"].bool() & (batch["labels"] != -100)
    expected = router_statistics(output, mask=trained, model=model).scalars()
    (log,) = (log for log in writer.logs if "loss" in log)
    assert {k: v for k, v in log.items() if "router/" in k} == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("micro_batches", "logged"),
    [
        pytest.param(1, [2, 4], marks=pytest.mark.slow("trainings by another library")),
        (3, [1, 2]),  # of two batches, so that each step is a short one
    ],
)
def test_lines_of_whole_epochs_have_them_too(micro_batches, logged, tmp_path):
    options = {"logging_strategy": "epoch", "logging_steps": 0, "max_steps": -1}
    trainer, _ = train(
        olmoe(),
        tmp_path,
        **options,
        num_train_epochs=2,
        gradient_accumulation_steps=micro_batches,
    )
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in lines] == logged
    assert all("router/load_entropy" in line for line in lines)


def test_statistics_stand_beside_router_losses_and_under_checkpointing(tmp_path):
    _, writer = train(swapped_mixtral(), tmp_path, before=add_router_losses, every=1)
    assert {"balance_loss", "router/balance_loss"} <= set(writer.logs[0])
    model = tiny_model(FAMILIES["olmoe"]).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    _, writer = train(model, tmp_path)
    assert "router/dead_experts/layer-0" in writer.logs[0]


def test_models_without_routers_and_steps_below_one_are_refused(tmp_path):
    arguments = Arguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(ValueError, match="no router of a supported family"):
        add_router_statistics(Trainer(nn.Linear(2, 2), arguments))
    for call in (
        lambda: add_router_statistics(Trainer(olmoe(), arguments), every=0),
        lambda: router_statistics_callback(every=0),
    ):
        with pytest.raises(ValueError, match="every must be >= 1; got every=0"):
            call()


def test_a_training_that_fails_leaves_no_hook(tmp_path):
    model = swapped_mixtral()

    class Stops(TrainerCallback):
        def on_pre_optimizer_step(self, *args, **kwargs):
            assert len(routers[0]._forward_hooks) == 2  # one of them watches
            raise KeyboardInterrupt

    routers = [site.router for site in router_sites(model)]
    before = [len(router._forward_hooks) for router in routers]
    with pytest.raises(KeyboardInterrupt):
        train(model, tmp_path, before=lambda trainer: trainer.add_callback(Stops()), every=1)
    assert [len(router._forward_hooks) for router in routers] == before == [1, 1]
    assert not model._forward_pre_hooks


class Module(nn.Module):
    """What a LightningModule is to the hooks: something that holds the model."""

    def __init__(self):
        super().__init__()
        self.model = tiny_model(FAMILIES["qwen3_moe"])


def test_lightnings_hooks_log_every_second_batch_to_every_logger():
    module, logged, images = Module(), [], []
    plain = types.SimpleNamespace(log_metrics=lambda numbers, step: logged.append((step, numbers)))
    board = types.SimpleNamespace(add_image=lambda *args: images.append(args))
    loggers = [plain, types.SimpleNamespace(log_metrics=plain.log_metrics, experiment=board)]
    trainer = types.SimpleNamespace(loggers=loggers, global_step=0, is_global_zero=True)
    hooks = RouterHooks(every=2)
    hooks.on_train_start(trainer, module)
    for count, row in enumerate(texts()):
        index = count % 3  # Lightning counts anew in every epoch
        hooks.on_train_batch_start(trainer, module, row, index)
        module.model(input_ids=row["input_ids"][None], attention_mask=row["attention_mask"][None])
        trainer.global_step += 1
        hooks.on_train_batch_end(trainer, module, None, row, index)
    hooks.on_train_end(trainer, module)
    hooks.on_train_start(trainer, module)
    for index in range(2):
        hooks.on_train_batch_start(trainer, module, None, index)
    assert any(site.router._forward_hooks for site in router_sites(module))
    hooks.on_exception(trainer, module, KeyboardInterrupt())
    assert [step for step, _ in logged] == [2, 2, 4, 4]
    assert [step for _, _, step in images] == [2, 4]
    assert logged[0][1].keys() >= {"router/load_entropy", "router/mean_margin/layer-1"}
    assert not any(site.router._forward_hooks for site in router_sites(module))
