"""Losses, bias balancing and pins in transformers' Trainer and TRL's, with any model."""

import contextlib
import re
import textwrap
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback

from l2r import pin_routes
from l2r.engines.trainer import add_bias_balancing, add_router_losses, add_router_statistics
from l2r.engines.trainer.router_log import Completions
from l2r.hf.swap import selection_biases, swap_routers
from l2r.hf.swap.families import FAMILIES
from l2r.routers import capture, router_losses, step_loads
from l2r.routers.model_calls import ModelCall
from tests.engines.test_hf_trainer import (
    CHECKPOINTING,
    Arguments,
    Gradients,
    Trainer,
    assert_equal_gradients,
    next_token,
    texts,
)
from tests.hf.families import tiny_model
from tests.processes import script

NAMES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral")


def collected(rows):
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def trainer_of(model, folder, batches, **options):
    """Trainer whose micro-batches are noted in ``batches``."""

    def collate(rows):
        batches.append(collected(rows))
        return dict(batches[-1])

    settings = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 1,
        "max_grad_norm": 0.0, "logging_steps": 1, "remove_unused_columns": False, "use_cpu": True,
        "report_to": "none", "disable_tqdm": True, "save_strategy": "no",
        "dataloader_pin_memory": False,
    }  # fmt: skip
    arguments = Arguments(output_dir=str(folder), **{**settings, **options})
    return Trainer(model, arguments, data_collator=collate, train_dataset=texts())


def explicit(model, batches, *, loads=None, **settings):
    """Gradients of the task loss of a step plus the mean router losses, written out."""
    task = next_token(batches)
    model.zero_grad()
    for batch in batches:
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        with capture(model) as captured:
            outputs = model(**inputs)
        extra = router_losses(captured, **settings, loads=loads).total
        (task(outputs.logits, batch["labels"]) + extra / len(batches)).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


class Kept(Gradients):
    """Gradients of the parameters that have one."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        self.steps.append(grads)


@pytest.mark.parametrize("scope", ["microbatch", "step", "sequence"])
@pytest.mark.parametrize("name", NAMES)
def test_a_stock_model_s_step_is_the_explicit_sum(name, scope, tmp_path):
    model, batches, watch = tiny_model(FAMILIES[name]).train(), [], Kept()
    if hasattr(model, "router_aux_loss_coef"):  # counted twice, it would show
        model.config.output_router_logits, model.router_aux_loss_coef = True, 100.0
    start = {key: value.clone() for key, value in model.state_dict().items()}
    trainer = trainer_of(model, tmp_path, batches)
    trainer.add_callback(watch)
    settings = {"balance": 0.5, "z": 0.1, "balance_scope": scope}
    add_router_losses(trainer, **settings)
    trainer.train()
    assert len(batches) == 2
    model.load_state_dict(start)
    model.config.output_router_logits = False
    loads = None
    if scope == "step":
        with torch.no_grad(), step_loads(model) as loads:
            for batch in batches:
                model(**{k: v for k, v in batch.items() if k != "labels"})
    expected = explicit(model, batches, loads=loads, **settings)
    assert_equal_gradients(watch.steps[0], expected)
    assert watch.logs == [] or "balance_loss" in trainer.state.log_history[0]


@pytest.mark.parametrize("kept", [False, True])
def test_the_model_s_own_loss_counts_once_or_not_at_all(kept, tmp_path):
    model, batches, watch = tiny_model(FAMILIES["mixtral"]).train(), [], Kept()
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.7
    start = {key: value.clone() for key, value in model.state_dict().items()}
    trainer = trainer_of(model, tmp_path, batches, gradient_accumulation_steps=1)
    trainer.add_callback(watch)
    add_router_losses(trainer, balance=0.5, keep_own_loss=kept)
    trainer.train()
    model.load_state_dict(start)
    model.zero_grad()
    with capture(model) as captured:
        output = model(**batches[0])
    own = 0.7 * output.aux_loss
    task = output.loss if kept else output.loss - own
    (task + router_losses(captured, balance=0.5).total).backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for key, gradient in watch.steps[0].items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6)


def test_a_step_counted_over_micro_batches_that_are_made_in_it_is_refused(tmp_path):
    trainer = trainer_of(tiny_model(FAMILIES["mixtral"]), tmp_path, [])
    plain = trainer.get_batch_samples
    losses = add_router_losses(trainer, balance_scope="step")
    losses._collects = lambda *args: ([["a prompt"], ["another"]], plain(*args)[1])
    with pytest.raises(ValueError, match="use gradient_accumulation_steps=1 or another scope"):
        trainer.train()


class Biases(TrainerCallback):
    """Biases at the end of each step."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.steps.append({p: b.clone() for p, b in selection_biases(model).items()})


@pytest.mark.parametrize("swapped", [False, True], ids=["stock", "swapped"])
@pytest.mark.parametrize("name", ["deepseek_v3", "lfm2_moe"])
def test_biases_move_by_the_loads_of_a_step_and_go_on_from_a_checkpoint(name, swapped, tmp_path):
    def build():
        model = tiny_model(FAMILIES[name])
        return (swap_routers(model) if swapped else model).train()

    def run(steps, **options):
        model, batches, seen = build(), [], Biases()
        more = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 0.0}
        trainer = trainer_of(model, tmp_path / "out", batches, max_steps=steps, **more)
        trainer.add_callback(seen)
        add_bias_balancing(trainer, speed=0.01)
        trainer.train(**options)
        return model, batches, seen, trainer

    start = selection_biases(build())
    model, batches, seen, trainer = run(2)
    with torch.no_grad():
        fresh = build()
        with capture(fresh) as captured:
            for batch in batches[:2]:
                fresh(**{k: v for k, v in batch.items() if k != "labels"})
    for path, outputs in captured.outputs.items():
        pairs = zip(outputs, batches, strict=False)
        chosen = torch.cat(
            [o.indices[b["attention_mask"].flatten().bool()].flatten() for o, b in pairs]
        )
        load = torch.bincount(chosen, minlength=8).double()
        moved = start[path] - 0.01 * torch.sign(load - load.mean()).float()
        torch.testing.assert_close(seen.steps[0][path], moved, rtol=0, atol=1e-7)
    assert "bias_balancing/max_over_mean" in trainer.state.log_history[0]
    assert not any(m._forward_pre_hooks for m in model.modules())
    _, _, again, _ = run(2, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert len(again.steps) == 1
    for path, bias in again.steps[0].items():
        torch.testing.assert_close(bias, seen.steps[1][path], rtol=0, atol=1e-6)


def test_all_of_it_at_once_with_checkpointing(tmp_path):
    model, batches = tiny_model(FAMILIES["deepseek_v3"]).train(), []
    trainer = trainer_of(model, tmp_path, batches, **{CHECKPOINTING: True})
    add_router_losses(trainer, balance=0.01, balance_scope="sequence")
    add_bias_balancing(trainer)
    add_router_statistics(trainer)
    with pin_routes(model):
        trainer.train()
    line = trainer.state.log_history[0]
    names = ("balance_loss", "bias_balancing/bias_span", "router/load_entropy/layer-1")
    assert set(names) <= set(line)
    hooks = [m._forward_hooks or m._forward_pre_hooks for m in model.modules()]
    assert not any(h for h in hooks if any("l2r" in str(f) for f in h.values()))


def trl_trainers(model, folder):
    """SFT, DPO and GRPO of TRL."""
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{n}": n for n in range(64)}
    plain = Tokenizer(models.WordLevel(words, unk_token="w3"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="w0", eos_token="w2")
    common = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": 1,
        "report_to": "none", "use_cpu": True, "bf16": False, "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True, "gradient_checkpointing": False,
    }  # fmt: skip
    pairs = Dataset.from_dict(
        {"prompt": ["w3 w4"] * 4, "chosen": ["w5 w6"] * 4, "rejected": ["w7 w8 w9"] * 4}
    )
    model.save_pretrained(folder / "model")  # DPO and GRPO may open it again, as a reference
    given = {"processing_class": tokenizer}
    model = type(model).from_pretrained(folder / "model").train()
    yield trl.SFTTrainer(
        model, **given, args=trl.SFTConfig(**common, max_length=16),
        train_dataset=Dataset.from_dict({"text": ["w3 w4 w5 w6 w7"] * 4}),
    )  # fmt: skip
    options = trl.DPOConfig(**common, max_length=16)
    yield trl.DPOTrainer(model, **given, args=options, train_dataset=pairs)
    yield trl.GRPOTrainer(
        model, **given, reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
        args=trl.GRPOConfig(**common, num_generations=2, max_completion_length=4),
        train_dataset=pairs.select_columns(["prompt"]),
    )  # fmt: skip


@pytest.mark.tool("trl")
@pytest.mark.filterwarnings("ignore")
def test_trl_s_trainers_take_losses_biases_and_statistics(tmp_path):
    model = tiny_model(FAMILIES["deepseek_v3"]).train()
    for trainer in trl_trainers(model, tmp_path):
        add_router_losses(trainer, balance=0.01)
        add_bias_balancing(trainer)
        add_router_statistics(trainer)
        before = {path: bias.clone() for path, bias in selection_biases(trainer.model).items()}
        with contextlib.redirect_stdout(None):
            trainer.train()
        line = trainer.state.log_history[0]
        kind = type(trainer).__name__
        assert line["balance_loss"] > 0 and "router/load_entropy/layer-1" in line, kind
        now = selection_biases(trainer.model)
        assert any(not torch.equal(before[path], now[path]) for path in now), kind


def test_completions_of_trl_s_batches_are_what_is_trained_on():
    """GRPO's rows in two calls with gradients, DPO's with a mask as wide as the inputs."""
    grpo = {
        "prompt_mask": torch.ones(4, 2, dtype=torch.int64),
        "completion_mask": torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]]),
    }
    found = Completions.of(grpo)
    first, second = ModelCall(rows=1), ModelCall(rows=3)
    assert found.of_call(first, 5).tolist() == [False, False, True, True, False]
    assert found.of_call(first, 5).sum() == 2  # of another layer
    assert found.of_call(second, 15).view(3, 5).sum(1).tolist() == [1, 3, 0]
    assert found.of_call(ModelCall(rows=1), 5) is None  # no row is left
    dpo = {"input_ids": torch.ones(2, 3), "completion_mask": torch.tensor([[0, 1, 1], [0, 0, 1]])}
    assert Completions.of(dpo).of_call(ModelCall(rows=2), 6).sum() == 3
    tools = Completions.of({**grpo, "tool_mask": torch.tensor([[1, 0, 0]]).expand(4, 3)})
    assert tools.of_call(ModelCall(rows=4), 20).sum() == 3
    assert Completions.of({"input_ids": torch.ones(2, 3)}) is None


LOOP = """
import copy, torch, l2r
from lightning.pytorch import LightningModule, Trainer
from tests.hf.families import sample_tokens, tiny_model
from l2r.hf.models.version_names import checkpoint_activations
from l2r.hf.swap import selection_biases
from l2r.hf.swap.families import FAMILIES

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = tiny_model(FAMILIES["deepseek_v3"])

    def on_train_start(self):
        self.balancing = l2r.bias_balancing(self.model)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

SNIPPET

module = Module()
plain = copy.deepcopy(module.model).train()
checkpoint_activations(module.model)
ids = sample_tokens(6)
batches = [{"input_ids": part, "labels": part} for part in ids.split([1, 2, 3])][:2]
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = Trainer(max_steps=1, accumulate_grad_batches=2, accelerator="cpu", **quiet)
trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
with l2r.bias_balancing(plain) as balancing:  # by the loads of both
    for batch in batches:
        plain(**batch)
    balancing.step()
biases, expected = selection_biases(module.model), selection_biases(plain)
assert all(torch.equal(biases[path], bias) for path, bias in expected.items())
print("trained")
"""


@pytest.mark.tool("lightning")
def test_the_page_s_loop_runs_in_lightning(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "your-loop.md").read_text()
    snippet = re.search(r"```python\n(def training_step.*?)```", page, re.S)[1]
    code = LOOP.replace("SNIPPET", textwrap.indent(snippet, "    "))
    assert "trained" in script(tmp_path, code).succeed()
