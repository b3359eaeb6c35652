"""DeepSpeed: ZeRO-3 on two ranks, with torch's optimizers."""

import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import deepspeed
import torch
from deepspeed.comm.torch import build_shm_op

from scripts.others.tools.rows import Row, row
from scripts.others.tools.subjects import IDS, Subject, in_routers
from tests.processes import on_two_ranks

ROWS: list[Row] = []


@cache
def _extensions() -> TemporaryDirectory[str]:
    """Compile DeepSpeed's all-reduce into a folder of this run.

    Ranks have a deadline. One that is killed while it compiles leaves a lock, for which all later
    ones wait.
    """
    folder = TemporaryDirectory()
    os.environ["TORCH_EXTENSIONS_DIR"] = folder.name
    build_shm_op()
    return folder


def _steps(rank: int, subject: Subject, extensions: str) -> list[float]:
    """Loss of three steps; every rank has the same batch, so one process gives the same."""
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["TORCH_EXTENSIONS_DIR"] = extensions
    model = subject.model().train()
    options = {
        "train_micro_batch_size_per_gpu": 2,
        # Small parameters stay whole otherwise, and these models have no others.
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=options)
    losses = []
    for _ in range(3):
        loss = engine(input_ids=IDS, labels=IDS, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


@row(ROWS, "ZeRO-3 on two ranks gives the losses of one process")
def zero3(subject: Subject) -> None:
    """Three steps of SGD."""
    extensions = _extensions().name
    with TemporaryDirectory() as folder:
        first, second = on_two_ranks(_steps, Path(folder), subject, extensions)
    model = subject.model().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    assert any(p.requires_grad for _, p in in_routers(model))
    torch.testing.assert_close(torch.tensor(first), torch.tensor(expected), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(second), torch.tensor(expected), atol=1e-4, rtol=1e-4)
