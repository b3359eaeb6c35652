"""Routing gain: what is replaced, what is kept, and on which models it works."""

from types import SimpleNamespace

import pytest
import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from l2r import L2RConfig
from l2r.analysis.diagnostics.routing_gain import (
    batch_loss,
    measure_routing_gain,
    other_experts,
    sample_evenly,
)
from l2r.hf.swap import swap_routers
from l2r.routers.observe import find_routers, hooked
from l2r.text.perplexity import token_losses
from tests.analysis.diagnostics.models import SIZES, batches, ours, stock


def loss(model, batch):
    return token_losses(model, batch["input_ids"]).mean()


def swapped():
    model = OlmoeForCausalLM(OlmoeConfig(**SIZES))
    swap_routers(model, L2RConfig(heads=2))
    return model.eval()


@pytest.mark.parametrize("make", [ours, stock, swapped])
def test_it_is_the_rise_of_the_loss_with_other_experts(make):
    model, data = make(), [*batches(2), *batches(1, rows=2)]
    gain = measure_routing_gain(model, data, loss)
    rows = [4, 4, 2]
    with torch.no_grad():
        own = sum(n * loss(model, batch) for n, batch in zip(rows, data, strict=True)) / sum(rows)
    assert gain.loss == pytest.approx(own.item(), rel=1e-6)
    assert gain.random != 0 != gain.shuffled and gain.random != gain.shuffled
    assert (
        gain
        == measure_routing_gain(model, data, loss)
        != measure_routing_gain(model, data, loss, seed=1)
    )


def test_a_gain_is_what_the_loss_rises_by():
    """By hand: the loss with the routers' outputs replaced, less its own, over all rows."""
    model, data = ours(), [*batches(2), *batches(1, rows=2)]
    gain, generator = (
        measure_routing_gain(model, data, loss, seed=3),
        torch.Generator().manual_seed(3),
    )
    routers, sums = find_routers(model).values(), {"own": 0.0, "random": 0.0, "shuffled": 0.0}

    def replaced(kind):
        def hook(module, args, output):
            indices = other_experts(output.indices, 6, kind, generator)
            return output._replace(indices=indices)

        return dict.fromkeys(routers, hook)

    for batch in data:
        for kind in sums:
            with torch.no_grad(), hooked({} if kind == "own" else replaced(kind)):
                sums[kind] += len(batch["input_ids"]) * float(loss(model, batch)) / 10
    assert gain.loss == pytest.approx(sums["own"], rel=1e-6)
    assert gain.random == pytest.approx(sums["random"] - sums["own"], rel=1e-5)
    assert gain.shuffled == pytest.approx(sums["shuffled"] - sums["own"], rel=1e-5)
    assert gain.numbers() == {
        "cross_entropy": gain.loss, "routing_gain": gain.random, "shuffled_gain": gain.shuffled,
    }  # fmt: skip


def test_the_loss_is_a_mean_over_tokens_of_batches_of_any_length():
    model = ours()
    data = [*batches(1), *batches(1, rows=2, length=4)]
    with torch.no_grad():
        every = torch.cat([token_losses(model, batch["input_ids"]).flatten() for batch in data])
    assert measure_routing_gain(model, data, loss).loss == pytest.approx(every.mean().item())


def test_the_gain_is_that_of_the_model_in_evaluation_mode():
    """Dropout would make every loss another draw; what was training goes on training."""
    model, data = ours(), batches()
    expected = measure_routing_gain(model, data, loss)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()
    model.lm_head.eval()
    modes = [part.training for part in model.modules()]
    assert measure_routing_gain(model, data, loss) == expected
    assert [part.training for part in model.modules()] == modes


def test_the_same_experts_give_no_gain():
    """Every token has the same first experts, so those of another token are its own."""
    model = ours("linear")
    for router in find_routers(model).values():
        torch.nn.init.zeros_(router.weight)
    assert measure_routing_gain(model, batches(), loss).shuffled == 0


def test_random_experts_are_k_different_ones_and_shuffled_ones_keep_the_load():
    indices = torch.stack([torch.randperm(6)[:2] for _ in range(500)])
    generator = torch.Generator().manual_seed(0)
    random = other_experts(indices, 6, "random", generator)
    assert random.shape == indices.shape and (random[:, 0] != random[:, 1]).all()
    assert set(random.flatten().tolist()) == set(range(6))
    shuffled = other_experts(indices, 6, "shuffled", generator)
    order = [sorted(map(tuple, rows.tolist())) for rows in (shuffled, indices)]
    assert order[0] == order[1] and not torch.equal(shuffled, indices)


def test_weights_and_logits_stay_and_nothing_is_left_on_the_model():
    model, seen = ours(), []

    def see(module, args, output):
        seen.append(output)

    (batch,) = batches(1)
    routers = find_routers(model)
    before = {name: len(router._forward_hooks) for name, router in routers.items()}
    with hooked(dict.fromkeys(routers.values(), see)):
        measure_routing_gain(model, [batch], loss)
    first = [seen[i] for i in (0, 2, 4)]  # of the first layer: its own, random, shuffled
    for output in first[1:]:
        assert torch.equal(output.weights, first[0].weights)
        assert torch.equal(output.logits, first[0].logits)
    assert before == {name: len(router._forward_hooks) for name, router in routers.items()}
    assert not model.training


@pytest.mark.parametrize(("rows", "size"), [(3, 8), (5, 2), (12, 4), (100, 8)])
def test_rows_for_the_gain_are_spread_evenly(rows, size):
    numbers = torch.arange(12)
    batches = [{"row": part, "twice": 2 * part} for part in numbers.split(5)]
    found = sample_evenly(batches, 12, rows, size)
    assert max(len(batch["row"]) for batch in found) <= size
    every = -(-12 // rows)
    assert sorted(torch.cat([batch["row"] for batch in found]).tolist()) == [*range(0, 12, every)]
    assert all(torch.equal(batch["twice"], 2 * batch["row"]) for batch in found)


def test_images_have_one_loss_each_so_more_of_them_count():
    images = [{"pixel_values": part} for part in torch.arange(5000).split(100)]
    for part, count, kept in ((images, 5000, 5000 // 3 + 1), (images[:3], 300, 300)):
        found = sample_evenly(part, count, 64, 50)
        assert sum(len(batch["pixel_values"]) for batch in found) == kept


def test_the_loss_of_text_and_of_images():
    model, (batch,) = ours(), batches(1)
    assert batch_loss(model, batch) == loss(model, batch)
    logits, targets = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])

    class Classifier(torch.nn.Module):
        def forward(self, pixel_values):
            return SimpleNamespace(logits=logits)

    images = {"pixel_values": torch.zeros(5, 1, 2, 2), "targets": targets}
    expected = -logits.log_softmax(1)[torch.arange(5), targets].mean()
    torch.testing.assert_close(batch_loss(Classifier(), images), expected)


def test_no_batches_are_refused():
    with pytest.raises(ValueError, match="at least 1 batch"):
        measure_routing_gain(ours(), [], loss)
