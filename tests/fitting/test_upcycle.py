"""Upcycling: new routers learn the old ones' decisions, and the model keeps its perplexity."""

import copy

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from torch import nn

from l2r import L2RConfig, LinearConfig, Router, capture
from l2r.fitting.fit import FitOptions, perplexity
from l2r.fitting.teacher_agreement import compare, divergence
from l2r.fitting.upcycling import JointOptions, train_jointly, upcycle
from l2r.functional import load_balancing_loss, router_z_loss
from l2r.hf.checkpoints import load_pretrained
from l2r.hf.swap import swap_routers
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.swap import UntrainedRoutersWarning
from l2r_lab.routers.mixture import MixtureConfig
from tests.hf.families import tiny_model
from tests.tiers import few

CONFIG = L2RConfig(rank=8, heads=4)


def batches(count, seed, rows=8, length=24):
    """Synthetic text: the next token is looked up by the last one and the parity before it."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(3, 64, (64, 2), generator=torch.Generator().manual_seed(99))
    result = []
    for _ in range(count):
        ids = torch.randint(3, 64, (rows, 2), generator=generator)
        for _ in range(length - 2):
            following = table[ids[:, -1], ids[:, -2] % 2]
            surprise = torch.rand(rows, generator=generator) < 0.2
            drawn = torch.randint(3, 64, (rows,), generator=generator)
            following = torch.where(surprise, drawn, following)
            ids = torch.cat([ids, following[:, None]], dim=1)
        result.append(ids)
    return result


@pytest.fixture(scope="module")
def trained():
    """A tiny OLMoE trained on the synthetic text until it knows the rule."""
    torch.manual_seed(0)
    model = tiny_model(FAMILIES["olmoe"]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for ids in batches(300, seed=0):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.slow("a whole training")
def test_the_fit_recovers_decisions_and_perplexity(trained):
    model = copy.deepcopy(trained)
    result = upcycle(model, CONFIG, batches(80, seed=1), batches(4, seed=2))
    ppl = result.perplexity
    lost, kept = ppl["swapped"] - ppl["original"], ppl["fitted"] - ppl["original"]
    assert abs(kept) < 0.2 * lost
    assert [layer.layer for layer in result.layers] == [0, 1]
    for layer in result.layers:
        assert 1 - layer.agreement < 0.5 * (1 - layer.agreement_before)
        assert layer.divergence < 0.5 * layer.divergence_before
    assert perplexity(model, batches(4, seed=2)) == pytest.approx(ppl["fitted"])


@pytest.mark.slow("a fit to convergence")
def test_a_linear_router_recovers_the_old_one_almost_exactly(trained):
    model = copy.deepcopy(trained)
    options = FitOptions(updates=8, lr=0.05)
    result = upcycle(
        model, LinearConfig(), batches(80, seed=1), batches(4, seed=2), options=options
    )
    assert result.agreement > 0.95


def test_only_routers_change_in_the_fit(trained):
    model = copy.deepcopy(trained)
    before = {k: v.clone() for k, v in model.state_dict().items() if ".gate." not in k}
    upcycle(model, CONFIG, batches(3, seed=1), batches(1, seed=2))
    after = model.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items())
    assert all(p.grad is None for n, p in model.named_parameters() if ".gate." not in n)


@pytest.mark.slow("a whole training")
def test_joint_training_improves_on_the_fit(trained):
    model = copy.deepcopy(trained)
    joint = JointOptions(steps=20, lr=2e-3)
    result = upcycle(model, CONFIG, batches(30, seed=1), batches(4, seed=2), joint=joint)
    assert result.perplexity["trained"] < result.perplexity["fitted"]
    assert not model.training


def test_copying_nothing_leaves_the_drawn_routers(trained):
    model = copy.deepcopy(trained)
    options = FitOptions(updates=0)
    result = upcycle(model, CONFIG, batches(1, seed=1), batches(2, seed=2), options=options)
    assert list(result.perplexity) == ["original", "swapped"]
    assert all(layer.agreement == layer.agreement_before for layer in result.layers)


def test_a_mixture_of_routers_starts_from_the_attention_heads(trained):
    model = copy.deepcopy(trained)
    config = MixtureConfig(routers=2, rank=8)
    upcycle(model, config, batches(1, 1), batches(1, 2), options=FitOptions(updates=0))
    for layer in model.model.layers:
        assert torch.equal(layer.mlp.gate.projection.weight, layer.self_attn.q_proj.weight[:16])


def test_some_layers_only(trained):
    model = copy.deepcopy(trained)
    result = upcycle(model, CONFIG, batches(2, seed=1), batches(1, seed=2), layers=[1])
    assert [layer.layer for layer in result.layers] == [1]
    assert [n for n, m in model.named_modules() if isinstance(m, Router)] == [
        "model.layers.1.mlp.gate"
    ]


@pytest.mark.parametrize(
    "name", few(["deepseek_v3", "minimax_m2", "lfm2_moe", "ernie4_5_moe"], ["deepseek_v3"], "fits")
)
def test_families_with_sigmoids_and_biases_fit_too(name, tmp_path):
    model = tiny_model(FAMILIES[name])
    result = upcycle(model, CONFIG, batches(40, seed=1), batches(2, seed=2))
    for layer in result.layers:
        assert layer.agreement > layer.agreement_before
        assert layer.divergence < layer.divergence_before
    model.save_pretrained(tmp_path)
    ids = batches(1, seed=3)[0]
    assert torch.equal(load_pretrained(tmp_path)(ids).logits, model(ids).logits)


def test_agreement_is_complete_when_the_new_router_is_the_old_one(trained):
    from l2r.fitting import upcycling as module

    sites = module.select_sites(trained)
    students = [module.new_router(site, LinearConfig()) for site in sites]
    with torch.no_grad():
        for site, student in zip(sites, students, strict=True):
            student.weight.copy_(site.router.weight)
    compared = list(compare(trained, sites, students, batches(2, seed=4)))
    assert len(compared) == len(sites) > 0
    for agreement, apart in compared:
        assert agreement == 1.0
        assert apart == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_divergence_equals_the_sum_in_float64(gate):
    teacher, student = torch.randn(2, 5, 4, dtype=torch.float64)
    total = 0.0
    for t, s in zip(teacher.numpy(), student.numpy(), strict=True):
        if gate == "softmax":
            p, q = np.exp(t) / np.exp(t).sum(), np.exp(s) / np.exp(s).sum()
            total += sum(a * np.log(a / b) for a, b in zip(p, q, strict=True))
        else:
            p, q = 1 / (1 + np.exp(-t)), 1 / (1 + np.exp(-s))
            pairs = zip(p, q, strict=True)
            total += sum(a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b)) for a, b in pairs)
    assert divergence(teacher, student, gate=gate).item() == pytest.approx(total / 5, rel=1e-9)


def test_perplexity_of_a_uniform_model_is_the_vocabulary():
    model = tiny_model(FAMILIES["olmoe"])
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert perplexity(model, batches(2, seed=0)) == pytest.approx(64, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (FitOptions, "lr", 0.0),
        (FitOptions, "updates", -1),
        (JointOptions, "lr", float("nan")),
        (JointOptions, "z", -0.1),
    ],
)
def test_bad_options_are_named(options, field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        options(**{field: value})


def test_joint_training_of_codes_is_refused_before_the_fit(trained):
    model, said = copy.deepcopy(trained), []
    codes = torch.zeros(4, dtype=torch.uint8)
    model.model.norm.codes = torch.nn.Parameter(codes, requires_grad=False)
    given = (model, CONFIG, batches(1, seed=1), batches(1, seed=2))
    with pytest.raises(ValueError, match=r"model\.norm\.codes is torch\.uint8: dequantize"):
        upcycle(*given, joint=JointOptions(steps=1), report=lambda *line: said.append(line))
    assert not said and not any(isinstance(m, Router) for m in model.modules())


def test_joint_training_of_offloaded_weights_is_refused_before_the_fit(trained):
    """accelerate puts other parameters in their place at each call, which no optimizer has."""
    model, said = copy.deepcopy(trained), []
    cpu_offload(model, execution_device="cpu")
    given = (model, CONFIG, batches(1, seed=1), batches(1, seed=2))
    with pytest.raises(ValueError, match=r"must be in memory; .* is offloaded"):
        upcycle(*given, joint=JointOptions(steps=1), report=lambda *line: said.append(line))
    assert not said and not any(isinstance(m, Router) for m in model.modules())


def test_empty_batches_are_refused(trained):
    with pytest.raises(ValueError, match="held_out must hold at least one batch"):
        upcycle(copy.deepcopy(trained), CONFIG, batches(1, seed=0), [])


def test_joint_training_of_a_bf16_model_keeps_small_updates(trained):
    """Norm weights are 1, where half a step of bf16 is 2**-9 (downwards): more than one update."""
    steps, rate = 20, 1e-3
    assert rate < 2**-9 < steps * rate
    start = copy.deepcopy(trained)
    swap_routers(start, CONFIG)
    for name, parameter in start.named_parameters():  # the same numbers in both
        if ".gate." not in name:
            parameter.data = parameter.data.bfloat16().float()
    narrow = copy.deepcopy(start)
    for name, parameter in narrow.named_parameters():
        if ".gate." not in name:
            parameter.data = parameter.data.bfloat16()
    dtypes = {name: parameter.dtype for name, parameter in narrow.named_parameters()}
    options = JointOptions(steps=steps, lr=rate)
    wide, text = copy.deepcopy(start), batches(4, seed=1)
    for model in (wide, narrow):
        train_jointly(model, text, options, lambda *_: None)
    assert {n: p.dtype for n, p in narrow.named_parameters()} == dtypes
    assert set(dtypes.values()) == {torch.bfloat16, torch.float32}
    before, after, found = (dict(m.named_parameters()) for m in (start, wide, narrow))
    names = [name for name in before if name.endswith("layernorm.weight")]
    with torch.no_grad():
        moved = torch.cat([after[n] - before[n] for n in names])
        apart = torch.cat([found[n] - after[n] for n in names])
    assert apart.norm() < 0.7 * moved.norm()  # lost updates leave all of it


def test_joint_training_adds_the_weighted_auxiliary_losses(trained, monkeypatch):
    model, (text,) = copy.deepcopy(trained), batches(1, seed=3)
    with pytest.warns(UntrainedRoutersWarning):
        swap_routers(model, CONFIG)
    with torch.no_grad(), capture(model) as record:
        logits = model(input_ids=text, use_cache=False).logits[:, :-1].double()
        own = nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    balance = load_balancing_loss(record.logits(), record.indices())
    z = router_z_loss(record.logits())
    losses = []
    backward = torch.autograd.backward
    monkeypatch.setattr(torch.autograd, "backward", lambda x: (losses.append(x), backward(x)))
    options = JointOptions(steps=1, balance=0.3, z=0.2)
    train_jointly(model, [text], options, lambda *_: None)
    assert losses[0].item() == pytest.approx((own + 0.3 * balance + 0.2 * z).item(), rel=1e-5)
