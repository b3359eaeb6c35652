"""One optimizer step by Lightning, transformers' Trainer and TRL's: own_loop.py has the others.

The same two micro-batches where the tool takes batches, activation checkpointing and bfloat16.
"""

import contextlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import lightning
import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import l2r
from l2r.engines.trainer import add_bias_balancing, add_router_losses, add_router_statistics
from l2r.engines.trainer.lightning import router_statistics_callback
from l2r.hf.models.version_names import checkpoint_activations
from scripts.others.tools.own_loop import (
    BALANCE,
    MICRO_BATCHES,
    SCOPES,
    SPEED,
    RefusedError,
    Routes,
    around,
    batches,
    counted_loads,
    ddp,
    extra,
    fsdp2,
    opened,
    plain,
)
from scripts.others.tools.subjects import Subject, tokenizer
from scripts.others.tools.watching import NO_LABEL, Noise, Seen, watching


class Module(lightning.LightningModule):
    """Features as docs/your-loop.md puts them into a module."""

    def __init__(self, model: Any, feature: str, seen: Seen, routes: Any) -> None:
        super().__init__()
        self.model, self.feature, self.seen, self.routes = model, feature, seen, routes
        self.automatic_optimization = feature != "losses, step"

    def on_train_start(self) -> None:
        """Open what lasts for the training."""
        if self.feature == "bias_balancing":
            self.balancing = l2r.bias_balancing(self.model, SPEED)
        if self.feature == "pin_routes":
            l2r.pin_routes(self.model)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Move the biases after the step."""
        super().optimizer_step(*args, **kwargs)
        if self.feature == "bias_balancing":
            self.balancing.step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Note the gradients: the last backward pass runs inside of the optimizer's step."""
        self.seen.note_gradients(self.model.base_model)

    def training_step(self, batch: Any, at: int) -> Any:
        """The loss of a micro-batch; of the whole step by manual optimization."""
        if self.automatic_optimization:
            return self._loss(batch, at, None)
        optimizer: Any = self.optimizers()
        loads = counted_loads(self.model, batch, contextlib.nullcontext)
        for number, part in enumerate(batch):
            self.manual_backward(self._loss(part, number, loads) / len(batch))
        optimizer.step()
        return None

    def _loss(self, batch: Any, at: int, loads: Any) -> Tensor:
        self.seen.trained.append((batch["labels"] != NO_LABEL).flatten())
        routes = self.routes and self.routes[0][at]
        with around(self.model, self.feature, self.seen, routes) as captured:
            loss: Tensor = self.model(**batch).loss
        if self.feature in SCOPES:
            loss = loss + extra(captured, self.feature, loads, self.seen)
        return loss

    def configure_optimizers(self) -> Any:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Logger(lightning.pytorch.loggers.logger.DummyLogger):
    """Keeps what it gets."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def log_metrics(self, metrics: dict[str, float], *_: Any, **__: Any) -> None:
        """Keep numbers of routers."""
        self._seen.found.setdefault("numbers", {}).update(metrics)


def in_lightning(subject: Subject, feature: str, routes: Routes | None = None) -> list[Seen]:
    """Lightning with ``bf16-mixed`` and ``accumulate_grad_batches``."""
    if feature == "shard_routers":
        raise RefusedError("not tried, since weights are whole in one process")
    model, rows = opened(subject), batches()
    checkpoint_activations(model)
    if "pin_routes" in feature:
        Noise(model)
    whole = feature == "losses, step"
    with TemporaryDirectory() as folder, watching(model) as seen:
        statistics = feature == "router_statistics"
        trainer = lightning.Trainer(
            accelerator="cpu", precision="bf16-mixed", max_steps=1, default_root_dir=folder,
            accumulate_grad_batches=1 if whole else len(rows), enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1,
            logger=Logger(seen) if statistics else False,
            callbacks=[router_statistics_callback(every=len(rows))] if statistics else [],
        )  # fmt: skip
        data: Any = [rows] if whole else rows
        trainer.fit(Module(model, feature, seen, routes), DataLoader(data, batch_size=None))
        if statistics:  # of the last micro-batch alone, as the callback says
            seen.found["last"] = True
    return [seen]


WORDS = ["w3 w4 w5 w6 w7 w8", "w9 w10 w11", "w12 w13 w14 w15 w16", "w17 w18"]
PAIRS = Dataset.from_dict(
    {
        "prompt": ["w3 w4 w5", "w6 w7", "w8", "w9 w10 w11"],
        "chosen": ["w12 w13", "w14 w15 w16", "w17 w18", "w19"],
        "rejected": ["w20 w21 w22", "w23", "w24 w25", "w26 w27"],
    }
)


def _settings(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder, "per_device_train_batch_size": 2, "max_steps": 1, "report_to": [],
        "gradient_accumulation_steps": MICRO_BATCHES, "use_cpu": True, "bf16": True,
        "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "max_grad_norm": 0.0,
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "dataloader_pin_memory": False, "seed": 3,
    }  # fmt: skip


def hf_trainer(model: Any, folder: str) -> Any:
    """transformers' own."""
    rows = [{k: v[i] for k, v in batch.items()} for batch in batches() for i in range(2)]
    return Trainer(model, TrainingArguments(**_settings(folder)), train_dataset=rows)


def sft(model: Any, folder: str) -> Any:
    """TRL's for texts."""
    options = SFTConfig(**_settings(folder), max_length=16, router_aux_loss_coef=0.0)
    texts = Dataset.from_dict({"text": WORDS})
    return SFTTrainer(model, args=options, train_dataset=texts, processing_class=tokenizer())


def dpo(model: Any, folder: str) -> Any:
    """TRL's for preferences."""
    options = DPOConfig(**_settings(folder), max_length=16, router_aux_loss_coef=0.0)
    return DPOTrainer(model, args=options, train_dataset=PAIRS, processing_class=tokenizer())


def grpo(model: Any, folder: str) -> Any:
    """TRL's for rewards."""

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(map(ord, text)) % 7) for text in completions]

    options = GRPOConfig(
        **_settings(folder), num_generations=2, max_completion_length=4, router_aux_loss_coef=0.0
    )
    return GRPOTrainer(
        model, reward_funcs=reward, args=options, train_dataset=PAIRS.select_columns(["prompt"]),
        processing_class=tokenizer(),
    )  # fmt: skip


def by_trainer(
    build: Callable[..., Any], subject: Subject, feature: str, routes: Routes | None = None
) -> list[Seen]:
    """A step of a trainer built on transformers'."""
    if feature == "shard_routers":
        raise RefusedError("not tried, since weights are whole in one process")
    model = opened(subject)
    with TemporaryDirectory() as folder, ExitStack() as blocks:
        torch.manual_seed(0)
        trainer = build(model, folder)
        model = trainer.model
        if "pin_routes" in feature:
            Noise(model)
        seen = blocks.enter_context(watching(model))
        computes = trainer.compute_loss

        def compute_loss(called: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.trained.append(_trained(inputs))
            part = routes and routes[0][len(seen.trained) - 1]
            with around(called, "" if feature in SCOPES else feature, seen, part):
                return computes(called, inputs, *args, **kwargs)

        trainer.compute_loss = compute_loss
        if feature in SCOPES:
            add_router_losses(trainer, balance=BALANCE, balance_scope=SCOPES[feature])
        if feature == "bias_balancing":
            add_bias_balancing(trainer, SPEED)
        if feature == "router_statistics":
            add_router_statistics(trainer)
        if feature == "pin_routes":
            blocks.enter_context(l2r.pin_routes(model))
        with contextlib.redirect_stdout(None):
            trainer.train()
        seen.found["numbers"] = trainer.state.log_history[0]
        if "balance_loss" in seen.found["numbers"]:
            seen.found["balance"] = [seen.found["numbers"]["balance_loss"]]
    return [seen]


def _trained(inputs: Mapping[str, Any]) -> Tensor:
    """Tokens of a micro-batch that a loss is computed of: completions, or what has a label."""
    if "completion_mask" not in inputs:
        return (inputs["labels"] != NO_LABEL).flatten()
    mask = inputs["completion_mask"]
    if "prompt_mask" in inputs:
        mask = torch.cat([torch.zeros_like(inputs["prompt_mask"]), mask], dim=1)
    return mask.bool().flatten()


TOOLS: dict[str, Callable[..., list[Seen]]] = {
    "plain loop": plain,
    "Trainer": partial(by_trainer, hf_trainer),
    "TRL SFT": partial(by_trainer, sft),
    "TRL DPO": partial(by_trainer, dpo),
    "TRL GRPO": partial(by_trainer, grpo),
    "Lightning": in_lightning,
    "DDP, 2 ranks": ddp,
    "FSDP2, 2 ranks": fsdp2,
}
