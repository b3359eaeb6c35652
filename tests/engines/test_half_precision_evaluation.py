"""Trainer evaluates in half precision by changing the model in place: routers keep theirs."""

import copy

import pytest
import torch
from transformers import Trainer, TrainingArguments

from l2r.engines.trainer import add_router_losses
from l2r.routers import Router
from tests.engines.test_hf_trainer import olmoe, swapped_mixtral, texts


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [olmoe, swapped_mixtral])
@pytest.mark.parametrize("losses", [False, True])
def test_routers_are_in_float32_while_trainer_evaluates_and_afterwards(
    make, half, losses, tmp_path
):
    option = "bf16_full_eval" if half is torch.bfloat16 else "fp16_full_eval"
    settings = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, option: True}
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = half_but_routers(copy.deepcopy(model), half)
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path), per_device_eval_batch_size=1, **settings),
        eval_dataset=texts(1),
    )
    if losses:
        add_router_losses(trainer)
    loss = trainer.evaluate()["eval_loss"]
    names = in_routers(model)
    for name, value in model.state_dict().items():
        if name in names:
            assert value.dtype == torch.float32 and torch.equal(value, before[name]), name
        else:
            assert value.dtype == half, name  # as transformers leaves it
    with torch.no_grad():
        batch = {key: value[None] for key, value in texts(1)[0].items()}
        assert loss == pytest.approx(float(expected(**batch).loss), rel=1e-6)
    assert all("_apply" not in vars(module) for module in model.modules())
    assert {value.dtype for value in model.bfloat16().state_dict().values()} == {torch.bfloat16}


def in_routers(model):
    paths = [path for path, module in model.named_modules() if isinstance(module, Router)]
    assert paths
    return {name for name in model.state_dict() if name.startswith(tuple(f"{p}." for p in paths))}


def half_but_routers(model, half):
    """All floats in half precision, as ``model.to`` makes them, and the routers as they were."""
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    model, names = model.to(half), in_routers(model)
    for name, value in model.state_dict(keep_vars=True).items():
        if name in names:
            value.data = whole[name]
    return model


def test_a_failed_evaluation_leaves_the_routers_as_they_were(tmp_path):
    model = swapped_mixtral()
    settings = {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path), bf16_full_eval=True, **settings),
        eval_dataset=[{"input_ids": torch.full((4,), 10**6), "labels": torch.zeros(4).long()}],
    )
    with pytest.raises(IndexError):
        trainer.evaluate()
    assert all("_apply" not in vars(module) for module in model.modules())
    assert {p.dtype for p in model.model.layers[0].mlp.gate.parameters()} == {torch.float32}
