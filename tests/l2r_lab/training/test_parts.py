"""Schedule, parameter groups and objective of the loop."""

import math
import random

import pytest
import torch

from l2r import build_router, capture
from l2r.files.folder import RunFolder
from l2r.functional import load_balancing_loss, router_z_loss
from l2r.hf.models import (
    L2rOlmoeConfig,
    L2rOlmoeForCausalLM,
    L2rViTConfig,
    L2rViTForImageClassification,
)
from l2r_lab.training.checkpoint import (
    load_checkpoint,
    load_weights,
    save_checkpoint,
    steps_kept,
)
from l2r_lab.training.objective import auxiliary_losses, expert_loads, layer_usage, routing_summary
from l2r_lab.training.optimizer import build_optimizer, learning_rate
from l2r_lab.training.ranks import Ranks
from l2r_lab.training.recipes.schema import LossSection, OptimizerSection
from tests import reference


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        make = {"hidden_size": 8, "num_experts": 4, "top_k": 2}
        self.routers = torch.nn.ModuleList(build_router("l2r_sips", **make) for _ in range(3))
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x):
        for router in self.routers:
            router(x)
        return x


def test_learning_rate_follows_the_papers_schedule():
    section = OptimizerSection()  # 4e-4, 3e8 warmup tokens, to 10%
    end = 10_000_000_000
    assert learning_rate(section, 0, end) == pytest.approx(4e-5)
    assert learning_rate(section, 150_000_000, end) == pytest.approx(4e-4 * 0.55)
    assert learning_rate(section, 300_000_000, end) == pytest.approx(4e-4)
    assert learning_rate(section, (end + 300_000_000) // 2, end) == pytest.approx(4e-4 * 0.55)
    assert learning_rate(section, end, end) == pytest.approx(4e-5)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_learning_rate_between_warmup_and_end(share):
    """The power-reduced cosine: cos^2(x / 2) in place of (1 + cos x) / 2."""
    section = OptimizerSection(lr=3e-4, warmup=2000, warmup_start=0.25, final=0.05)
    warm = learning_rate(section, round(share * 2000), 10_000)
    assert warm == pytest.approx(3e-4 * (0.25 + 0.75 * share))
    falling = learning_rate(section, round(2000 + share * 8000), 10_000)
    assert falling == pytest.approx(3e-4 * (0.05 + 0.95 * math.cos(math.pi * share / 2) ** 2))


def test_warmup_longer_than_the_run_is_cut():
    section = OptimizerSection(warmup=1000)
    assert learning_rate(section, 100, 100) == pytest.approx(section.lr)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, set()),
        ({"decay_anchors": False}, {"anchors"}),
        ({"decay_norms": False}, {"norm"}),
        ({"decay_anchors": False, "decay_norms": False}, {"anchors", "norm"}),
    ],
)
def test_weight_decay_groups(changes, kept):
    model = Layers()
    optimizer = build_optimizer(model, OptimizerSection(**changes))
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    for name, parameter in model.named_parameters():
        kind = "anchors" if name.endswith("anchors") else "norm" if parameter.dim() < 2 else "other"
        assert (id(parameter) in decayed) == (kind not in kept), name


def vit():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8}
    experts = {"intermediate_size": 16, "num_experts": 4, "moe_layers": [1], "patch_size": 4}
    return L2rViTForImageClassification(L2rViTConfig(**sizes, **experts))


def olmoe():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    router = {"kind": "l2r_sips"}
    return L2rOlmoeForCausalLM(
        L2rOlmoeConfig(vocab_size=32, pad_token_id=None, **sizes, **experts, router=router)
    )


@pytest.mark.parametrize("build", [vit, olmoe])
@pytest.mark.parametrize("decay_anchors", [True, False])
def test_norms_biases_and_the_tokens_of_the_model_do_not_decay(build, decay_anchors):
    """As timm and DeiT have it, and by what a parameter is: expert biases are [N, F]."""
    model = build()
    section = OptimizerSection(decay_norms=False, decay_anchors=decay_anchors)
    optimizer = build_optimizer(model, section)
    decayed = {id(p) for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    matrices = {  # of every layer that multiplies its input, and what is looked up in a table
        id(parameter)
        for module in model.modules()
        if not type(module).__name__.endswith(("Norm", "Embeddings", "NormGain"))
        for name, parameter in module.named_parameters(recurse=False)
        if not name.endswith("bias") and (decay_anchors or name != "anchors")
    }
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[i] for i in decayed} == {names[i] for i in matrices}
    kept = set(names.values()) - {names[i] for i in decayed}
    assert any(name.endswith("norm.weight") for name in kept)
    if build is vit:
        ends = (".up_bias", ".down_bias", ".cls_token", ".position_embeddings", "classifier.bias")
        assert all(any(name.endswith(end) for name in kept) for end in ends), kept


def test_a_learned_temperature_never_decays():
    """Decay would pull its logarithm to 0, the temperature to 1."""
    router = build_router("linear", hidden_size=8, num_experts=4, top_k=2, learn_temperature=True)
    optimizer = build_optimizer(router, OptimizerSection(decay_norms=True))
    (kept,) = [g["params"] for g in optimizer.param_groups if not g["weight_decay"]]
    assert [id(p) for p in kept] == [id(router.log_temperature)]


@pytest.mark.parametrize("lifted", [True, False])
def test_a_learned_temperature_loads_whether_fsdp2_saved_it_or_not(lifted, tmp_path):
    """FSDP2 holds it as a vector of one; diagnose reads its checkpoints in a plain process."""
    make = {"hidden_size": 8, "num_experts": 4, "top_k": 2, "learn_temperature": True}
    saved, loaded = (build_router("linear", **make) for _ in range(2))
    (saved if lifted else loaded).lift_scalars()
    with torch.no_grad():
        saved.log_temperature.fill_(0.25)
    optimizer, ranks = build_optimizer(saved, OptimizerSection()), Ranks(0, 1, torch.device("cpu"))
    folder = save_checkpoint(RunFolder(tmp_path), 3, saved, optimizer, ranks, keep=1)
    assert load_weights(folder, loaded) == 3
    assert loaded.log_temperature.item() == 0.25
    torch.testing.assert_close(loaded.weight, saved.weight, rtol=0, atol=0)


def test_a_checkpoint_brings_back_the_random_state(tmp_path):
    model, ranks = Layers(), Ranks(0, 1, torch.device("cpu"))
    optimizer = build_optimizer(model, OptimizerSection())
    torch.manual_seed(5)
    folder = save_checkpoint(RunFolder(tmp_path), 1, model, optimizer, ranks, keep=1)
    expected = torch.rand(4)
    torch.manual_seed(6)
    assert load_checkpoint(folder, model, optimizer, ranks) == 1
    assert torch.equal(torch.rand(4), expected)


def test_a_run_that_began_on_a_cpu_resumes_on_a_gpu_and_back(tmp_path, monkeypatch):
    """torch.cuda's two functions are stood in for; no tensor lies on a GPU."""
    model = Layers()
    optimizer = build_optimizer(model, OptimizerSection())
    cpu, gpu = (Ranks(0, 1, torch.device(name)) for name in ("cpu", "cuda"))
    drawn, restored = torch.arange(16, dtype=torch.uint8), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: drawn.clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda value, device: restored.append(value))
    for saved, loaded, gpus in ((cpu, gpu, 0), (gpu, cpu, 0), (gpu, gpu, 1)):
        torch.manual_seed(5)
        folder = save_checkpoint(RunFolder(tmp_path), 1, model, optimizer, saved, keep=1)
        expected = torch.rand(4)
        torch.manual_seed(6)
        assert load_checkpoint(folder, model, optimizer, loaded) == 1
        assert torch.equal(torch.rand(4), expected) and len(restored) == gpus
    assert torch.equal(restored[0], drawn)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("fewer", r"Missing key .*model\.1\."),
        ("more", r"no place .*model\.1\."),
        ("nan", r"not finite .*model\.0\.weight"),
    ],
)
def test_a_checkpoint_of_another_model_is_not_loaded(change, message, tmp_path):
    def model(parts):
        router = {"hidden_size": 8, "num_experts": 4, "top_k": 2}
        return torch.nn.Sequential(*(build_router("linear", **router) for _ in range(parts)))

    saved, loaded = model(2 if change == "more" else 1), model(2 if change == "fewer" else 1)
    if change == "nan":
        with torch.no_grad():
            saved[0].weight[1, 2] = torch.nan
    ranks = Ranks(0, 1, torch.device("cpu"))
    optimizers = [build_optimizer(part, OptimizerSection()) for part in (saved, loaded)]
    folder = save_checkpoint(RunFolder(tmp_path), 3, saved, optimizers[0], ranks, keep=1)
    with pytest.raises(ValueError, match=message):
        load_weights(folder, loaded)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(folder, loaded, optimizers[1], ranks)


def test_auxiliary_losses_are_the_weighted_means_over_layers():
    model = Layers()
    with capture(model) as captured:
        model(torch.randn(9, 8))
    total, parts = auxiliary_losses(captured, LossSection(balance=0.5, z=0.25))
    balance = load_balancing_loss(captured.logits(), captured.indices())
    z = router_z_loss(captured.logits())
    torch.testing.assert_close(total, 0.5 * balance + 0.25 * z)
    torch.testing.assert_close(parts["balance"], balance.detach())
    total.backward()
    assert all(r.anchors.grad.abs().sum() > 0 for r in model.routers)


def test_the_margin_loss_is_off_by_default_and_weighs_what_experts_are_chosen_by():
    sizes = {"hidden_size": 8, "num_experts": 6, "top_k": 2}
    model = torch.nn.Sequential(
        build_router("l2r_sips", **sizes), build_router("linear", **sizes, selection_bias=True)
    )
    bias = torch.randn(6)
    model[1].e_score_correction_bias.copy_(bias)
    x = torch.randn(9, 8)
    with capture(model) as captured:
        for router in model:
            router(x)
    plain, parts = auxiliary_losses(captured, LossSection())
    assert "margin" not in parts
    section = LossSection(margin=0.5, margin_gap=0.3)
    total, parts = auxiliary_losses(captured, section)
    ranked = [model[0].logits(x), model[1].logits(x).softmax(1) + bias]
    for scores, indices in zip(ranked, captured.indices(), strict=True):
        assert torch.equal(scores.topk(2).indices.sort().values, indices.sort().values)
    expected = sum(reference.margin_loss(s.detach().double().numpy(), 2, 0.3) for s in ranked) / 2
    assert parts["margin"].item() == pytest.approx(expected, rel=1e-5) and expected > 0.05
    assert (total - plain).item() == pytest.approx(0.5 * expected, rel=1e-5)
    (total - plain).backward()
    assert model[0].anchors.grad.any() and model[1].weight.grad.any()


def test_the_centered_z_loss_counts_the_anchors_of_every_layer():
    sizes = {"hidden_size": 8, "num_experts": 4, "top_k": 2}
    model = torch.nn.Sequential(
        build_router("l2r_sips", **sizes, heads=3), build_router("linear", **sizes)
    )
    x = torch.randn(9, 8)
    with capture(model) as captured:
        for router in model:
            router(x)
    _, parts = auxiliary_losses(captured, LossSection(z_variant="centered"))
    levels = [model[0].logits(x).logsumexp(1) - math.log(12), model[1].logits(x).logsumexp(1)]
    levels[1] = levels[1] - math.log(4)
    expected = torch.stack([level.square().mean() for level in levels]).mean()
    torch.testing.assert_close(parts["z"], expected.detach())


def test_weights_without_router_outputs_are_an_error():
    model = Layers()
    with capture(model) as captured:
        pass
    with pytest.raises(ValueError, match="recorded no router outputs"):
        auxiliary_losses(captured, LossSection())


def test_routing_summary_of_a_collapsed_and_a_balanced_layer():
    from l2r.routers import Captured, RouterOutput

    logits, weights = torch.zeros(4, 4), torch.ones(4, 1)
    collapsed = RouterOutput(logits, weights, torch.zeros(4, 1, dtype=torch.long))
    balanced = RouterOutput(logits, weights, torch.arange(4)[:, None])
    summary = routing_summary(expert_loads(Captured({"a": [collapsed], "b": [balanced]})))
    assert summary["load_entropy"] == pytest.approx([0.0, 1.0])
    assert summary["max_over_mean"] == [4.0, 1.0] and summary["dead_experts"] == [3, 0]


def test_usage_counts_as_the_variant_counts():
    model = Layers()
    with capture(model) as captured:
        model(torch.randn(9, 8))
    loads = expert_loads(captured)
    assert layer_usage(captured, LossSection(), loads)[0].sum().item() == pytest.approx(2)
    first = layer_usage(captured, LossSection(balance_variant="tutel"), loads)
    assert first[0].sum().item() == pytest.approx(1)


def test_checkpoints_near_to_given_steps_stay_beside_the_newest():
    """Chosen after each save as the loop does, against a choice among all that were saved."""
    generator = random.Random(0)
    for _ in range(200):
        every, last = generator.randint(1, 9), generator.randint(20, 90)
        near = [generator.uniform(0, 1.3 * last) for _ in range(generator.randint(0, 3))]
        keep, saved, there = generator.randint(1, 3), [], set()
        for step in range(every, last + 1, every):
            saved.append(step)
            there = steps_kept(sorted({*there, step}), keep, near)
        distances = [min(abs(step - target) for step in saved) for target in near]
        for target, distance in zip(near, distances, strict=True):
            assert min(abs(step - target) for step in there) == distance
        assert set(saved[-keep:]) <= there and len(there) <= keep + len(near)
    assert steps_kept([10, 20, 30, 40], 1, [15]) == {10, 40}  # of two equally near, the earlier
