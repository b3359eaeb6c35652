"""Lightning: fit in three precisions, with the losses of README's loop for ours."""

from tempfile import TemporaryDirectory
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader

from l2r import capture, load_balancing_loss, router_z_loss
from scripts.others.tools.rows import Row, row
from scripts.others.tools.subjects import IDS, Subject

ROWS: list[Row] = []


class Module(lightning.LightningModule):
    """Language modeling with auxiliary losses: ours by ``capture``, stock's own."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.stock, self.losses = subject.kind == "stock", list[float]()
        self.model = subject.model()

    def training_step(self, ids: Any) -> Any:
        """The loss of a batch of token ids."""
        if self.stock:
            return self._note(self.model(ids, labels=ids, output_router_logits=True).loss)
        with capture(self.model) as record:
            loss = self.model(ids, labels=ids).loss
        loss = loss + 0.01 * load_balancing_loss(record.logits(), record.indices())
        return self._note(loss + 0.001 * router_z_loss(record.logits()))

    def _note(self, loss: Any) -> Any:
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fits(subject: Subject, precision: Any, **options: Any) -> None:
    with TemporaryDirectory() as folder:
        module = Module(subject)
        trainer = lightning.Trainer(
            accelerator="cpu", precision=precision, max_steps=4, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder, **options,
        )  # fmt: skip
        batches: Any = [*IDS] * 4
        trainer.fit(module, DataLoader(batches, batch_size=2))
        assert module.losses[-1] < module.losses[0], module.losses


@row(ROWS, "fit in 32 bits lowers the loss")
def full(subject: Subject) -> None:
    """precision=32."""
    _fits(subject, "32-true")


@row(ROWS, "fit with `bf16-mixed` lowers the loss")
def mixed(subject: Subject) -> None:
    """Autocast."""
    _fits(subject, "bf16-mixed")


@row(ROWS, "fit with `bf16-true` lowers the loss")
def half(subject: Subject) -> None:
    """Parameters in bf16, under a default dtype of bf16."""
    _fits(subject, "bf16-true")
