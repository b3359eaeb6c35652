"""A training step on a GPU never waits for the device: the loop's own step on tensors without data.

What would wait has no answer there: a number read on the host, a shape that depends on values, a
copy to the CPU. Meta tensors are not CPU tensors for the code, and kernels are the GPU's.
"""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from l2r.hf.models.version_names import checkpoint_activations
from l2r.kernels.dispatch import implementation
from l2r_lab.planning.sizes import example_batch, meta_model
from l2r_lab.training import step as training_step
from l2r_lab.training.optimizer import build_optimizer
from l2r_lab.training.ranks import Ranks
from l2r_lab.training.recipes.load import load_recipe
from l2r_lab.training.step import TrainingStep
from l2r_lab.training.task import task_class

GPU = torch.device("meta")  # in its place
SMALL = ["model.num_hidden_layers=2", "data.vocab_size=512", "data.sequence_length=16"]
aten = torch.ops.aten
READS = {
    aten._local_scalar_dense,
    aten.equal,
    aten.is_nonzero,
    aten.masked_select,
    aten.nonzero,
    aten.repeat_interleave,
    aten.unique_consecutive,
    aten.unique_dim,
    aten._unique2,
}


class WaitingError(AssertionError):
    """An operation for which the host waits."""


class NoWaiting(TorchDispatchMode):
    """Raises at every operation that needs values on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func.overloadpacket
        self.seen.add(str(packet))
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        waits = packet in READS and kwargs.get("output_size") is None
        if packet is aten.index or packet is aten.index_put_:
            waits = any(i is not None and i.dtype is torch.bool for i in args[1])
        if packet is aten._to_copy:
            waits = tensors[0].is_meta and torch.device(kwargs.get("device") or GPU).type == "cpu"
        if packet is aten.copy_ and len(tensors) == 2:
            waits = tensors[1].is_meta and tensors[0].is_cpu
        if waits:
            raise WaitingError(str(func))
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def fused_on_meta(monkeypatch):
    """AdamW asks for a list of devices whether its fused form is there."""
    name = "_get_fused_kernels_supported_devices"
    module = importlib.import_module("torch.optim.optimizer")
    supported = getattr(module, name)()
    monkeypatch.setattr(module, name, lambda: [*supported, GPU.type])


def walk(recipe, *, summarize=False) -> set[str]:
    """The operations of a step of two micro-batches."""
    model = meta_model(recipe)
    if recipe.training.activation_checkpointing:
        checkpoint_activations(model)
    batch = example_batch(recipe, model, 2, device=GPU)
    task = SimpleNamespace(
        loss=task_class(recipe).loss, micro_batches=lambda step, ranks: [batch, batch]
    )
    optimizer = build_optimizer(model, recipe.optimizer)
    step = TrainingStep(recipe, task, model, optimizer, Ranks(0, 1, GPU))
    with NoWaiting() as mode, implementation("triton"):
        step.take(0, 1e-3, summarize=summarize)
    return mode.seen


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("demo/l2r-sips", [*SMALL, "training.ema_decay=0.9", "losses.balance_scope=step"]),
        ("demo/xmoe", [*SMALL, "training.activation_checkpointing=true"]),
        ("demo/linear", [*SMALL, "training.loss_chunk=8"]),
        ("demo-vision/l2r-sips", ["model.num_labels=10"]),
    ],
)
def test_a_step_never_waits_for_the_gpu(recipe, changes):
    seen = walk(load_recipe(recipe, [*changes, "training.precision=fp32"]))
    assert "aten._fused_adamw_" in seen
    assert "l2r.route_backward" in seen  # the GPU's kernels, or their selection for linear


@pytest.mark.parametrize(
    "plant",
    [
        lambda load: load.sum().item(),
        lambda load: load.tolist(),
        lambda load: bool(load.sum() > 0),
        lambda load: load.cpu(),
        lambda load: load.nonzero(),
        lambda load: load[load > 0],
        lambda load: load.repeat_interleave((load > 0).long()),
    ],
    ids=["item", "tolist", "bool", "cpu", "nonzero", "mask", "repeat_interleave"],
)
def test_a_planted_wait_is_found(plant, monkeypatch):
    original = training_step.expert_loads

    def planted(captured):
        loads = original(captured)
        plant(next(iter(loads.values()))[0])
        return loads

    monkeypatch.setattr(training_step, "expert_loads", planted)
    with pytest.raises(WaitingError):
        walk(load_recipe("demo/linear", [*SMALL, "model.num_hidden_layers=1"]))


def test_numbers_that_are_logged_are_read():
    with pytest.raises(WaitingError, match="_to_copy"):
        walk(load_recipe("demo/linear", [*SMALL, "model.num_hidden_layers=1"]), summarize=True)
