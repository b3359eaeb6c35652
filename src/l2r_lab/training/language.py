"""The language task: OLMoE on packed tokens."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from l2r.errors import InputError, sizes
from l2r.hf.checkpoints import hugging_face_tokenizer, model_like
from l2r.hf.models import (
    L2rOlmoeConfig,
    L2rOlmoeForCausalLM,
    reading_whole_sequences,
    register_experts,
)
from l2r.text import (
    TokenDataset,
    balanced_rows,
    build_corpus,
    even_rows,
    name_domains_without_rows,
    token_losses,
    validation_loss,
)
from l2r_lab.training.ranks import Ranks
from l2r_lab.training.recipes import LanguageRecipe
from l2r_lab.training.run_corpus import corpus_options


class LanguageTask:
    """Tokens in, next-token cross-entropy out."""

    unit = "tokens"

    def __init__(self, recipe: LanguageRecipe, report: Callable[[str], None]) -> None:
        self.recipe, self.report = recipe, report
        data = recipe.data
        if recipe.evaluation.tasks:
            # Imported here: the task data is a separate package, which training can do without.
            from l2r_lab.training.evaluation import select_tasks, task_tokenizer

            select_tasks(recipe.evaluation.tasks)  # a wrong name should not cost a corpus
        self.tokenizer: Path | None = Path(data.tokenizer) if data.tokenizer else None
        if data.tokens:
            train: Any = data.tokens
            validation: Any = data.validation_tokens
        else:
            corpus = build_corpus(corpus_options(recipe), report=report)
            train, validation, self.tokenizer = corpus.train, corpus.validation, corpus.tokenizer
        self.train = TokenDataset(train, data.sequence_length)
        self.validation = TokenDataset(validation, data.sequence_length)
        if not self.train.tokenizer.is_same(self.validation.tokenizer):
            raise InputError(
                "data.tokens and data.validation_tokens must be of one tokenizer; got "
                f"{self.train.tokenizer.name} and {self.validation.tokenizer.name}, or others of "
                "these names"
            )
        name_domains_without_rows(self.validation, report)
        first = not data.tokens and data.corpus_version == 1
        self.choose_rows = even_rows if first else balanced_rows
        self.item_size = data.sequence_length
        self.items = len(self.train)
        if recipe.evaluation.tasks:  # nor should it cost training that no tokenizer fits
            loaded = None if self.tokenizer is None else hugging_face_tokenizer(self.tokenizer)
            self.reader = task_tokenizer(loaded, vocab_size=self.model_config().vocab_size)

    @property
    def draws_weights(self) -> bool:
        return self.recipe.model.init_from is None

    def build_model(self) -> nn.Module:
        start = self.recipe.model.init_from
        config = self.model_config()
        with sizes():
            model = L2rOlmoeForCausalLM(config) if start is None else model_like(config, start)
        # A model to start from may have a row for padding, which no gradient would reach.
        model.config.pad_token_id = model.get_input_embeddings().padding_idx = None
        model.set_experts_implementation(
            register_experts()
        )  # ours: fewer passes (docs/performance.md)
        return model

    def model_config(self) -> L2rOlmoeConfig:
        """Model configuration of the recipe with the tokenizer's vocabulary."""
        identity = self.train.tokenizer
        words = self.recipe.model.vocab_size
        if words is not None and words < identity.vocab_size:
            raise InputError(
                f"model.vocab_size must be >= {identity.vocab_size}, the tokenizer's; got {words}"
            )
        return L2rOlmoeConfig(
            **self.recipe.model_options(identity.vocab_size),
            eos_token_id=identity.eos_token_id,
        )

    def micro_batches(self, step: int, ranks: Ranks) -> list[dict[str, Tensor]]:
        training = self.recipe.training
        indices = self.train.batch(
            step,
            training.global_batch,
            self.recipe.seed,
            rank=ranks.rank,
            world_size=ranks.world,
        )
        rows = self.train.rows(indices)["input_ids"].to(ranks.device)
        return [{"input_ids": part} for part in torch.split(rows, training.micro_batch)]

    @staticmethod
    def loss(model: nn.Module, batch: dict[str, Tensor], chunk: int | None = None) -> Tensor:
        with reading_whole_sequences(model):
            return token_losses(model, batch["input_ids"], chunk=chunk).mean()

    def validate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        section = self.recipe.evaluation
        losses = validation_loss(
            model,
            self.validation,
            batch_size=section.batch_size,
            max_batches=section.max_batches,
            device=device,
            choose=self.choose_rows,
        )
        return {f"ce/{domain}": loss for domain, loss in losses.items()}

    def downstream(self, model: nn.Module) -> dict[str, float]:
        section = self.recipe.evaluation
        if not section.tasks:
            return {}
        from l2r_lab.training.evaluation import evaluate_tasks, paper_row

        results = evaluate_tasks(
            model,
            self.reader,
            section.tasks,
            limit=section.task_limit,
            batch_size=section.batch_size,
        )
        shares = {name: result.accuracy for name, result in results.items()}
        means = paper_row(results).accuracy
        for column in ("MMLU", "Overall"):
            mean = means[column]
            if mean is not None:
                shares[column.lower()] = mean / 100
        return shares

    def export(self, model: nn.Module, folder: Path) -> None:
        model.save_pretrained(folder)  # type: ignore[operator]
        if self.tokenizer is not None:
            source = self.tokenizer if self.tokenizer.is_dir() else self.tokenizer.parent
            for path in source.glob("*token*.json"):
                shutil.copyfile(path, folder / path.name)

    def describe(self) -> dict[str, Any]:
        return {
            "train_tokens": len(self.train) * self.item_size,
            "validation_tokens": len(self.validation) * self.item_size,
            "domains": list(self.train.domains),
            "tokenizer": self.train.tokenizer.name,
            "vocab_size": self.train.tokenizer.vocab_size,
            "text_sha256": f"{self.train.sha256} {self.validation.sha256}",
        }
