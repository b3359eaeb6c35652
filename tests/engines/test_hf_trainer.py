"""The router losses inside transformers' own Trainer, against the sum written out."""

import copy

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
)
from transformers import TrainingArguments as Arguments

from l2r.engines.trainer import (
    RouterLosses,
    add_bias_balancing,
    add_router_losses,
    add_router_statistics,
)
from l2r.functional import load_balancing_loss, router_margin_loss, router_z_loss
from l2r.hf.models import L2rOlmoeConfig, L2rOlmoeForCausalLM
from l2r.hf.models.vit import L2rViTConfig, L2rViTForImageClassification
from l2r.hf.swap import selection_biases, swap_routers
from l2r.routers import RouterConfig, capture
from tests.processes import Running, on_ranks

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 20,
    "max_position_embeddings": 16,
    "pad_token_id": 1,
    "eos_token_id": 0,
}
ROUTER = {"kind": "l2r_sips", "rank": 2, "heads": 4}
# Trainer's option and the models' methods had another name before transformers 5.23.
NAMES = ("activation_checkpointing", "gradient_checkpointing")
CHECKPOINTING = next(n for n in NAMES if hasattr(MixtralForCausalLM, f"{n}_disable"))


def olmoe(**router):
    return L2rOlmoeForCausalLM(
        L2rOlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, router={**ROUTER, **router})
    )


def swapped_mixtral():
    model = MixtralForCausalLM(
        MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, bos_token_id=0)
    )
    return swap_routers(model, RouterConfig.from_dict(ROUTER))


def texts(rows=4):
    """Rows with different numbers of padded tokens and of tokens without a label."""
    drawn = torch.randint(2, 20, (rows, 10), generator=torch.Generator().manual_seed(3))
    data = []
    for number, ids in enumerate(drawn):
        mask = (torch.arange(10) < 10 - 2 * (number % 3)).long()
        labels = torch.where(mask.bool() & (torch.arange(10) >= 3 * number), ids, -100)
        data.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return data


class Gradients(TrainerCallback):
    """Keeps the gradients of every step, and the logs a tracker would see."""

    def __init__(self):
        self.steps, self.logs = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters()})

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def train(
    model, data, tmp_path, *, weights=(0.5, 0.1), trainer_class=Trainer, losses=None, **options
):
    """Trainer, gradients, and the micro-batches in the order they were used."""
    batches, watch = [], Gradients()

    def collate(rows):
        keys = [key for key, value in rows[0].items() if value is not None]
        batches.append({key: torch.stack([row[key] for row in rows]) for key in keys})
        return dict(batches[-1])

    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 1,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "remove_unused_columns": False,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
    }
    arguments = Arguments(output_dir=str(tmp_path), **{**settings, **options})
    trainer = trainer_class(
        model, arguments, data_collator=collate, train_dataset=data, callbacks=[watch]
    )
    add_router_losses(trainer, balance=weights[0], z=weights[1], **(losses or {}))
    trainer.train()
    return trainer, watch, batches


def explicit_gradient(model, batches, *, weights, task_loss):
    """sum of the task losses / items + mean over micro-batches of the router losses."""
    model.zero_grad()
    found = []
    for batch in batches:
        with capture(model) as captured:
            outputs = model(**{k: v for k, v in batch.items() if k != "labels"})
        logits, indices = captured.logits(), captured.indices()
        mask = batch.get("attention_mask")
        balance = load_balancing_loss(logits, indices, mask=mask)
        z = router_z_loss(logits, mask=mask)
        loss = task_loss(outputs.logits, batch["labels"])
        (loss + (weights[0] * balance + weights[1] * z) / len(batches)).backward()
        found.append((balance.item(), z.item()))
    return {n: p.grad.clone() for n, p in model.named_parameters()}, found


def next_token(batches):
    """Sum over a micro-batch of next-token losses, divided by the labels of all of them."""
    items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)

    def loss(logits, labels):
        flat = logits[:, :-1].flatten(0, 1)
        sums = torch.nn.functional.cross_entropy(flat, labels[:, 1:].flatten(), reduction="sum")
        return sums / items

    return loss


def assert_equal_gradients(ours, expected):
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-7, rtol=1e-5, msg=name)


@pytest.mark.parametrize("build", [olmoe, swapped_mixtral])
@pytest.mark.parametrize("options", [{}, {CHECKPOINTING: True}])
def test_gradient_is_the_explicit_sum_under_accumulation(build, options, tmp_path):
    model = build()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    trainer, watch, batches = train(model, texts(), tmp_path, weights=(0.5, 0.1), **options)
    assert len(batches) == 2
    model.load_state_dict(start)
    getattr(model, f"{CHECKPOINTING}_disable")()
    task = next_token(batches)
    expected, found = explicit_gradient(model, batches, weights=(0.5, 0.1), task_loss=task)
    assert_equal_gradients(watch.steps[0], expected)
    assert expected["model.layers.0.mlp.gate.anchors"].abs().max() > 0
    balance, z = (sum(values) / 2 for values in zip(*found, strict=True))
    for logs in (watch.logs[0], trainer.state.log_history[0]):
        assert logs["balance_loss"] == pytest.approx(balance, rel=1e-5)
        assert logs["z_loss"] == pytest.approx(z, rel=1e-5)


def test_a_short_last_step_weighs_its_one_micro_batch_whole(tmp_path):
    """Three micro-batches by two a step: the second step's router losses are those of one."""
    model = olmoe()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"max_steps": -1, "num_train_epochs": 1, "learning_rate": 0.0}
    _, watch, batches = train(model, texts(6), tmp_path, **options)
    assert len(batches) == 3 and len(watch.steps) == 2
    model.load_state_dict(start)
    for gradients, own in zip(watch.steps, (batches[:2], batches[2:]), strict=True):
        task = next_token(own)
        expected, _ = explicit_gradient(model, own, weights=(0.5, 0.1), task_loss=task)
        assert_equal_gradients(gradients, expected)


@pytest.mark.parametrize("masked", [0, 1], ids=["mask first", "mask last"])
def test_a_micro_batch_without_a_mask_has_none_of_the_one_before(masked, tmp_path):
    model = olmoe()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    data = texts()
    for number, row in enumerate(data):
        if number // 2 != masked:
            row |= {"input_ids": row["input_ids"].clamp_min(2), "attention_mask": None}

    class InOrder(Trainer):
        def _get_train_sampler(self, *args):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    _, watch, batches = train(model, data, tmp_path, trainer_class=InOrder)
    assert ["attention_mask" in batch for batch in batches] == [masked == 0, masked == 1]
    model.load_state_dict(start)
    task = next_token(batches)
    expected, _ = explicit_gradient(model, batches, weights=(0.5, 0.1), task_loss=task)
    assert_equal_gradients(watch.steps[0], expected)


@pytest.mark.parametrize("biased", [False, True])
def test_the_margin_loss_is_added_by_its_weight_and_logged(biased, tmp_path):
    """It is of what experts are chosen by: with a selection bias no longer the logits."""
    model, data = olmoe(selection_bias=biased), texts()
    biases = selection_biases(model)
    for number, bias in enumerate(biases.values()):
        bias.copy_(torch.tensor([0.3, 0.0, 0.1, -0.1]).roll(number))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    losses = {"margin": 0.7, "margin_gap": 0.5}
    _, watch, batches = train(model, data, tmp_path, weights=(0, 0), losses=losses)
    model.load_state_dict(start)
    task = next_token(batches)
    model.zero_grad()
    found = []
    for batch in batches:
        with capture(model) as captured:
            outputs = model(**{k: v for k, v in batch.items() if k != "labels"})
        ranking = captured.logits()
        if biased:
            pairs = zip(ranking, biases.values(), strict=True)
            ranking = [logits.softmax(dim=1) + bias for logits, bias in pairs]
        margin = router_margin_loss(ranking, top_k=2, gap=0.5, mask=batch.get("attention_mask"))
        (task(outputs.logits, batch["labels"]) + 0.7 * margin / len(batches)).backward()
        found.append(margin.item())
    assert_equal_gradients(watch.steps[0], {n: p.grad for n, p in model.named_parameters()})
    assert watch.logs[0]["margin_loss"] == pytest.approx(sum(found) / 2, rel=1e-5)
    assert min(found) > 0.01


def test_image_classifiers_train_with_the_same_call(tmp_path):
    config = L2rViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_labels=3,
        hidden_dropout_prob=0.0,
        router=ROUTER,
    )
    model = L2rViTForImageClassification(config)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    data = [{"pixel_values": torch.randn(1, 8, 8), "labels": torch.tensor(i % 3)} for i in range(4)]
    _, watch, batches = train(model, data, tmp_path)
    model.load_state_dict(start)

    def classes(logits, labels):
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / 4

    expected, _ = explicit_gradient(model, batches, weights=(0.5, 0.1), task_loss=classes)
    assert_equal_gradients(watch.steps[0], expected)


@pytest.mark.parametrize("build", [olmoe, swapped_mixtral])
def test_a_model_that_adds_its_own_balance_loss_counts_none_twice(build, tmp_path):
    """TRL sets output_router_logits, with which a model adds a balance loss to its own."""
    model = build()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    model.config.output_router_logits, model.router_aux_loss_coef = True, 100.0
    _, watch, batches = train(model, texts(), tmp_path, weights=(0.5, 0.1))
    model.load_state_dict(start)
    own = model(**batches[0]).loss
    model.config.output_router_logits = False
    assert own - model(**batches[0]).loss > 10  # at least 1 of a layer, times its weight
    assert model.router_aux_loss_coef == 100.0  # as it was, when the step is over
    task = next_token(batches)
    expected, _ = explicit_gradient(model, batches, weights=(0.5, 0.1), task_loss=task)
    assert_equal_gradients(watch.steps[0], expected)


def test_a_loss_function_of_the_user_stays_the_task_loss(tmp_path):
    def nothing(outputs, labels, num_items_in_batch=None):
        return 0 * outputs.logits.sum()

    class WithLoss(Trainer):
        def __init__(self, *args, **options):
            super().__init__(*args, compute_loss_func=nothing, **options)

    model = olmoe()
    _, watch, _ = train(model, texts(), tmp_path, trainer_class=WithLoss)
    assert watch.steps[0]["lm_head.weight"].abs().max() == 0
    assert watch.steps[0]["model.layers.1.mlp.gate.projection.weight"].abs().max() > 0


def test_evaluation_reports_the_task_loss_alone(tmp_path):
    model, data = olmoe(), texts()
    trainer, _, _ = train(model, data, tmp_path, weights=(1e3, 1e3), learning_rate=0.0)
    found = trainer.evaluate(data[:2])["eval_loss"]
    batch = {key: torch.stack([row[key] for row in data[:2]]) for key in data[0]}
    with torch.no_grad():
        assert found == pytest.approx(model(**batch).loss.item(), rel=1e-5)


def test_a_trained_model_has_no_hooks_and_a_trainer_may_train_twice(tmp_path):
    model = olmoe()
    trainer, watch, _ = train(model, texts(), tmp_path)
    assert not model._forward_hooks and not model._forward_pre_hooks
    torch.save(model, tmp_path / "model.pt")
    assert "balance_loss" in watch.logs[0]
    trainer.args.max_steps = 2
    trainer.train()
    assert sum("balance_loss" in logs for logs in watch.logs) >= 2
    losses = next(c for c in trainer.callback_handler.callbacks if isinstance(c, RouterLosses))
    assert not losses._sums.any()  # nothing of this training is in the first line of the next
    assert not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize("add", [add_router_losses, add_router_statistics, add_bias_balancing])
def test_a_trainer_that_makes_its_model_anew_is_refused(add, tmp_path):
    """Each train() would make one that what was added has never seen."""
    arguments = Arguments(tmp_path, report_to=[], use_cpu=True)
    trainer = Trainer(model_init=swapped_mixtral, args=arguments)
    with pytest.raises(ValueError, match="must be given model=, not model_init"):
        add(trainer)


class Failing(Trainer):
    """Fails in the second forward pass of training, and after that no more."""

    calls = 0

    def training_step(self, model, inputs, *args, **options):
        self.calls += 1
        if self.calls == 2:
            inputs = {**inputs, "input_ids": inputs["input_ids"] + 10**6}  # of no token
        return super().training_step(model, inputs, *args, **options)


def test_a_training_that_fails_leaves_no_hook_and_can_be_repeated(tmp_path):
    """Neither of the model, whose forward failed, nor of its routers, which were recorded."""
    model, made = swapped_mixtral(), []

    class Kept(Failing):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(self)

    with pytest.raises(IndexError):
        train(model, texts(), tmp_path, trainer_class=Kept)
    assert not model._forward_hooks and not model._forward_pre_hooks
    routers = [layer.mlp.gate for layer in model.model.layers]
    assert [len(r._forward_hooks) for r in routers] == [1] * 2  # logits' own
    copy.deepcopy(model)
    made[0].train()
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_reentrant_checkpointing_is_refused(tmp_path):
    options = {
        CHECKPOINTING: True,
        f"{CHECKPOINTING}_kwargs": {"use_reentrant": True},
    }
    with pytest.raises(ValueError, match="router outputs carry no gradient"):
        train(olmoe(), texts(), tmp_path, **options)


def test_a_trainer_with_a_loss_of_its_own_gets_them_too(tmp_path):
    """As TRL's, which take no loss function; its loss is divided by the micro-batches, or not."""

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            return 0 * model(**inputs).logits.sum()

    model = olmoe()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    _, watch, batches = train(model, texts(), tmp_path, trainer_class=Own)
    model.load_state_dict(start)
    expected, _ = explicit_gradient(
        model, batches, weights=(0.5, 0.1), task_loss=lambda logits, labels: 0 * logits.sum()
    )
    assert_equal_gradients(watch.steps[0], expected)


def test_a_step_without_accelerate_s_backward_is_refused(tmp_path):
    class Own(Trainer):
        def training_step(self, model, inputs, *args, **kwargs):
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            loss.backward()
            return loss.detach()

    with pytest.raises(ValueError, match=r"Own took a step without calling accelerator\.backward"):
        train(olmoe(), texts(), tmp_path, trainer_class=Own)


def test_outputs_that_were_not_recorded_are_refused(tmp_path):
    class Elsewhere(Trainer):
        """Runs a copy, as DataParallel would."""

        def compute_loss(self, model, inputs, **kwargs):
            import copy

            other = copy.deepcopy(model)
            other._forward_pre_hooks.clear()
            other._forward_hooks.clear()
            return super().compute_loss(other, inputs, **kwargs)

    with pytest.raises(ValueError, match="no router output was recorded"):
        train(olmoe(), texts(), tmp_path, trainer_class=Elsewhere)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ((-1.0, 0.0), {}, "balance must be >= 0 and finite; got balance=-1.0"),
        ((0.1, float("nan")), {}, "z must be >= 0 and finite"),
    ],
)
def test_bad_settings_are_named(weights, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(olmoe(), texts(), tmp_path, weights=weights, **options)


def test_settings_that_contradict_each_other_are_refused(tmp_path):
    for losses, message in (
        ({"balance_scope": "batch"}, "balance_scope must be one of microbatch, step, sequence"),
        ({"balance_scope": "sequence", "balance_variant": "hf"}, "DeepSeek-V3's loss"),
    ):
        with pytest.raises(ValueError, match=message):
            train(olmoe(), texts(), tmp_path, losses=losses)


def test_a_model_without_routers_is_refused(tmp_path):
    dense = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.raises(ValueError, match="no router of a supported family; it has no experts"):
        train(dense, texts(), tmp_path)


def test_label_smoothing_smooths_the_task_loss_alone(tmp_path):
    model = olmoe()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    _, watch, batches = train(model, texts(), tmp_path, label_smoothing_factor=0.3)
    model.load_state_dict(start)
    plain = next_token(batches)
    items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)

    def smooth(logits, labels):
        counted = labels[:, 1:] != -100
        uniform = -logits[:, :-1].log_softmax(-1).mean(-1)[counted].sum() / items
        return 0.7 * plain(logits, labels) + 0.3 * uniform

    expected, _ = explicit_gradient(model, batches, weights=(0.5, 0.1), task_loss=smooth)
    assert_equal_gradients(watch.steps[0], expected)


def on_a_rank(folder):
    torch.manual_seed(0)
    trainer, watch, batches = train(olmoe(), texts(8), folder / "trainer")
    rank, world = trainer.args.process_index, trainer.accelerator.num_processes
    found = {"world": world, "batches": batches, "gradients": watch.steps[0], "logs": watch.logs[0]}
    torch.save(found, folder / f"{rank}.pt")
    trainer.accelerator.wait_for_everyone()
    torch.distributed.destroy_process_group()


@pytest.mark.slow("two processes")
def test_two_ranks_take_the_mean_over_all_micro_batches(tmp_path):
    on_ranks(2, tmp_path / "output", Running, on_a_rank, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first["world"] == second["world"] == 2
    batches = [*first["batches"], *second["batches"]]
    rows = torch.cat([batch["input_ids"] for batch in batches])
    assert len(batches) == 4 and len(torch.unique(rows, dim=0)) == 8
    torch.manual_seed(0)
    task = next_token(batches)
    expected, found = explicit_gradient(olmoe(), batches, weights=(0.5, 0.1), task_loss=task)
    for ours in (first, second):
        assert_equal_gradients(
            {name.removeprefix("module."): g for name, g in ours["gradients"].items()}, expected
        )
        assert ours["logs"]["balance_loss"] == pytest.approx(sum(b for b, _ in found) / 4, rel=1e-5)
