"""Each remedy that check names exists, and does for this family what it promises."""

import copy
import functools
import re
import warnings

import pytest
import torch
from transformers import Trainer, TrainingArguments

from l2r import L2RConfig, bias_balancing, capture, router_losses
from l2r.analysis.diagnostics.checks import check_model
from l2r.engines.trainer import add_bias_balancing, add_router_losses
from l2r.hf.swap import selection_biases
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import router_sites
from l2r.hf.swap.swap import swap_routers
from tests.hf.families import FAULTS, tiny_model
from tests.tiers import few

FAST = ("olmoe", "mixtral", "deepseek_v3", "gpt_oss", "cohere2_moe", "deepseek_v4")


def batch_of():
    ids = torch.randint(3, 60, (4, 24), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids}


def found_in(model, **options):
    return {found.check: found for found in check_model(model, batch_of(), **options)}


def trainer_of(model, folder):
    return Trainer(model, TrainingArguments(str(folder), report_to="none", use_cpu=True))


def turns_its_loss_on(model, folder):
    found = found_in(model)["auxiliary loss"].found
    path = re.search(r"config((?:\.\w+)*)\.output_router_logits is False", found)[1]
    config = functools.reduce(getattr, path.split(".")[1:], model.config)
    assert config.output_router_logits is False
    config.output_router_logits = True
    assert found_in(model)["auxiliary loss"].status == "ok"


def adds_losses(model, folder):
    add_router_losses(trainer_of(model, folder), balance=0.01)
    with capture(model) as captured:
        model(**batch_of(), use_cache=False)
    router_losses(captured, balance=0.01).total.backward()
    gradients = [p.grad for s in router_sites(model) for p in s.router.parameters()]
    assert any(g is not None and bool(g.any()) for g in gradients)
    assert found_in(model, balance=0.01)["auxiliary loss"].status == "ok"


def moves_its_bias(model, folder):
    if folder is not None:
        add_bias_balancing(trainer_of(model, folder)).stop()
    before = {path: bias.float().clone() for path, bias in selection_biases(model).items()}
    with bias_balancing(model) as balancing:
        model(**batch_of(), use_cache=False)
        balancing.step()
        found = found_in(model)
        assert found["auxiliary loss"].status == "ok" and "moves" in found["auxiliary loss"].found
        assert found["selection bias"].status == "ok"
    assert any(not torch.equal(before[p], b) for p, b in selection_biases(model).items())


# Words of a remedy and what tries it; a remedy of a stock model has some of them.
TRIED = {
    "set it to True": turns_its_loss_on,
    "turn the model's balance loss on": turns_its_loss_on,
    "l2r.engines.trainer.add_router_losses(trainer)": adds_losses,
    "add_bias_balancing": moves_its_bias,
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    few(
        [(name, dtype) for name in FAMILIES for dtype in ("float32", "bfloat16")],
        lambda case: case[0] in FAST and case[1] == "bfloat16",
        "every family",
    ),
)
@pytest.mark.filterwarnings("ignore")
def test_every_remedy_for_a_stock_checkpoint_works(name, dtype, tmp_path):
    model = tiny_model(FAMILIES[name]).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "stock")
    model = type(model).from_pretrained(tmp_path / "stock", dtype="auto").train()
    named = {found.check: found for found in found_in(model).values() if found.remedy}
    for check, found in named.items():
        if check == "padding" and "padding" in FAULTS.get(name, ()):
            assert "or batches without padding" in found.remedy
            continue
        ways = [way for words, way in TRIED.items() if words in found.remedy]
        assert ways, f"nothing tries this remedy: {found}"
        for way in ways:
            way(copy.deepcopy(model), tmp_path)
    remedies = " ".join(found.remedy for found in named.values())
    assert ("add_bias_balancing" in remedies) == bool(selection_biases(model))
    if not selection_biases(model):
        has_none_and_says_what_to_do(model)


def has_none_and_says_what_to_do(model):
    words = "swap_routers(model, L2RConfig(selection_bias=True), selection='router')"
    with pytest.raises(ValueError, match="has no selection bias to move") as refused:
        bias_balancing(model)
    assert words in str(refused.value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        swap_routers(model, L2RConfig(selection_bias=True), selection="router")
    moves_its_bias(model, None)
