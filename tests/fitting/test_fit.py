"""A swap, then a fit: the new routers decide as the old ones, on text that the fit has not seen."""

import copy
import re
from contextlib import nullcontext

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

from l2r import L2RConfig, LinearConfig, XMoEConfig, fit_routers, swap_routers
from l2r.fitting.fit import FitOptions, perplexity
from l2r.fitting.teacher_agreement import compare
from l2r.fitting.upcycling import JointOptions, upcycle
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import old_weight, router_sites
from l2r.hf.swap.swap import UntrainedRoutersWarning, unfitted_sites
from tests.fitting.test_upcycle import CONFIG, batches, trained
from tests.hf.families import TINY, tiny_model
from tests.state import state_of

__all__ = ["trained"]
WORDS = ["<unk>", "<eos>", "the", "cat", "sat", "on", "a", "mat", *map(str, range(40))]


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>")


@pytest.fixture
def swapped(trained):
    return swap_routers(copy.deepcopy(trained), CONFIG)


def test_a_swap_warns_that_its_routers_are_untrained(trained):
    with pytest.warns(UntrainedRoutersWarning, match=r"untrained.*l2r\.fit_routers") as warned:
        swap_routers(copy.deepcopy(trained), CONFIG)
    assert len(warned) == 1 and warned[0].filename == __file__


def test_a_fit_after_a_swap_is_the_upcycle_of_the_original(trained, swapped, capsys):
    data, held_out = batches(12, seed=1), batches(2, seed=2)
    one = copy.deepcopy(trained)
    expected = upcycle(one, CONFIG, data, held_out)
    assert fit_routers(swapped, data, held_out=held_out) == expected
    for name, value in one.state_dict().items():
        assert torch.equal(swapped.state_dict()[name], value), name
    assert list(expected.perplexity) == ["original", "swapped", "fitted"]
    assert perplexity(swapped, held_out) == pytest.approx(expected.perplexity["fitted"])
    assert re.search(
        r"12/12 .*agreement 0\.\d\d, least 0\.\d\d in layer [01]", capsys.readouterr().err
    )


def test_the_last_tenth_is_held_out_and_nothing_of_it_is_fitted_on(swapped):
    seen = []
    hook = swapped.register_forward_pre_hook(
        lambda module, args, given: seen.append(given["input_ids"][0, :8].tolist()),
        with_kwargs=True,
    )
    data = batches(20, seed=1)
    both = copy.copy(swapped)
    result = fit_routers(swapped, data, report=lambda *_: None)
    hook.remove()
    rows = [ids[0, :8].tolist() for ids in data]
    assert [seen.count(row) for row in rows[:18]] == [1] * 18  # observed once each
    assert [seen.count(row) for row in rows[18:]] == [5, 5]  # three perplexities, two agreements
    assert result.agreement > 0.25 and both is not swapped


def test_one_text_in_place_of_many_is_refused(swapped, tokenizer):
    for given in ({"data": "a text"}, {"data": ["a text"], "held_out": "a text"}):
        with pytest.raises(ValueError, match="must be sequences of texts or batches; got one str"):
            fit_routers(swapped, **given, tokenizer=tokenizer)


def test_batches_may_come_from_generators(trained):
    results = []
    for given in (list, iter):
        torch.manual_seed(0)
        model = copy.deepcopy(trained)
        swap_routers(model, CONFIG)
        data, held_out = given(batches(3, seed=1)), given(batches(1, seed=2))
        results.append(fit_routers(model, data, held_out=held_out, report=lambda *_: None))
    assert results[0] == results[1]


def test_texts_need_the_tokenizer_and_are_cut_into_rows(trained, tokenizer):
    model = swap_routers(tiny_model(FAMILIES["olmoe"]), CONFIG)
    texts = [f"the cat {n} sat on a mat {n + 7} " * 6 for n in range(30)]
    result = fit_routers(
        model, texts, tokenizer=tokenizer, sequence_length=16, report=lambda *_: None
    )
    for layer in result.layers:
        assert layer.divergence < layer.divergence_before
    again = swap_routers(copy.deepcopy(trained), CONFIG)
    with pytest.raises(ValueError, match="texts need a tokenizer"):
        fit_routers(again, texts)
    with pytest.raises(ValueError, match="at least 1000000 tokens"):
        fit_routers(again, texts, tokenizer=tokenizer, sequence_length=10**6)
    with pytest.raises(ValueError, match="texts or tensors of token ids; got int"):
        fit_routers(again, [1, 2])
    with pytest.raises(ValueError, match="at least two texts or batches"):
        fit_routers(again, batches(1, seed=0))


def test_routers_without_a_predecessor_in_memory_are_not_fitted(swapped, tmp_path):
    data = batches(2, seed=1)
    for model in (copy.deepcopy(swapped), tiny_model(FAMILIES["olmoe"])):
        with pytest.raises(ValueError, match="l2r swap CKPT --fit --data PATH"):
            fit_routers(model, data)
    fit_routers(swapped, data, report=lambda *_: None)
    with pytest.raises(ValueError, match="nothing fitted since"):
        fit_routers(swapped, data)


@pytest.mark.slow("two fits")
def test_a_second_swap_is_fitted_to_the_routers_that_were_trained(trained, swapped):
    """A router that was never fitted has nothing to teach; one that was fitted has."""
    first = [site.router for site, _ in unfitted_sites(swapped)]
    swap_routers(swapped, LinearConfig())
    assert [site.router for site, _ in unfitted_sites(swapped)] == first
    options = FitOptions(updates=8, lr=0.05)
    data = batches(60, seed=1)
    result = fit_routers(swapped, data, options=options, report=lambda *_: None)
    assert result.agreement > 0.95
    fitted = [layer.mlp.gate for layer in swapped.model.layers]
    swap_routers(swapped, CONFIG)
    assert [site.router for site, _ in unfitted_sites(swapped)] == fitted


def test_a_fit_that_stops_leaves_the_new_routers_in_their_places(swapped):
    def stop(stage, done, total, note=""):
        raise KeyboardInterrupt

    routers = [layer.mlp.gate for layer in swapped.model.layers]
    swapped.train()
    with pytest.raises(KeyboardInterrupt):
        fit_routers(swapped, batches(3, seed=1), report=stop)
    assert [layer.mlp.gate for layer in swapped.model.layers] == routers
    assert all(part.training for part in swapped.modules())
    assert len(unfitted_sites(swapped)) == 2  # and can be fitted again


def test_no_gradient_is_left_for_the_first_step_of_training(swapped):
    """A loop that zeroes after its step adds what is there already to the first gradient."""
    data = batches(3, seed=1)
    fit_routers(swapped, data, report=lambda *_: None)
    assert [name for name, p in swapped.named_parameters() if p.grad is not None] == []
    clean = copy.deepcopy(swapped)
    clean.zero_grad()
    for model in (swapped, clean):
        model(data[0], labels=data[0]).loss.backward()
    for one, other in zip(swapped.parameters(), clean.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("stops", [False, True])
def test_a_fit_leaves_gradients_modes_and_hooks_as_they_were(swapped, stops):
    swapped.train()
    swapped.model.layers[0].eval()
    swapped.lm_head.requires_grad_(False)
    (old, first), (_, second) = unfitted_sites(swapped)
    old.router.train()
    second.anchors.grad = torch.ones_like(second.anchors)
    first.anchors.requires_grad_(False)
    before = [state_of(part, values=False) for part in (swapped, old.router)]

    def report(*_):
        if stops:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if stops else nullcontext():
        fit_routers(swapped, batches(3, seed=1), report=report)
    assert [state_of(part, values=False) for part in (swapped, old.router)] == before


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_an_upcycle_leaves_the_modes_as_they_were(trained, training, stops):
    model = copy.deepcopy(trained).train(training)

    def report(stage, *_, **__):
        if stops and stage == "joint training":
            raise KeyboardInterrupt

    options = {"joint": JointOptions(steps=2), "report": report}
    with pytest.raises(KeyboardInterrupt) if stops else nullcontext():
        upcycle(model, CONFIG, batches(3, seed=1), batches(1, seed=2), **options)
    assert {part.training for part in model.modules()} == {training}
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_the_numbers_are_means_over_tokens_however_the_text_is_cut(trained, swapped):
    sites, students = router_sites(trained), [site.router for site in router_sites(swapped)]
    (rows,) = batches(1, seed=2, rows=9)
    whole, cut = (
        compare(trained, sites, students, each) for each in ([rows], [rows[:8], rows[8:]])
    )
    for one, other in zip(whole, cut, strict=True):
        assert one == pytest.approx(other, rel=1e-5)  # of float32 sums
    last = compare(trained, sites, students, [rows[8:]])
    assert abs(last[0][0] - whole[0][0]) > 1e-3  # else the case shows nothing


def test_what_cannot_be_fitted_is_said_in_one_line(swapped, trained):
    data = batches(2, seed=1)
    for off in (torch.no_grad, torch.inference_mode):
        with off(), pytest.raises(ValueError, match=r"by gradients, which are off here; [^\n]+$"):
            fit_routers(swapped, data)
        with off(), pytest.raises(ValueError, match="by gradients, which are off here"):
            upcycle(copy.deepcopy(trained), CONFIG, data, data)
    second = swapped.model.layers[1].mlp.gate
    for module, layers in ((second, r"\[1\]"), (swapped, r"\[0, 1\]")):
        module.requires_grad_(False)
        with pytest.raises(ValueError, match=rf"those of layers {layers} are frozen: [^\n]+$"):
            fit_routers(swapped, data)
    untouched = FitOptions(updates=0)
    fit_routers(swapped, data, options=untouched, report=lambda *_: None)  # only measures


def test_the_new_routers_of_a_frozen_model_are_fitted(trained):
    model = copy.deepcopy(trained).requires_grad_(False)
    swap_routers(model, CONFIG)
    result = fit_routers(model, batches(3, seed=1), report=lambda *_: None)
    for layer in result.layers:
        assert layer.divergence < layer.divergence_before
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trains == {name for name, _ in model.named_parameters() if ".gate." in name}


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_routers_of_other_families_are_fitted(name):
    model = tiny_model(FAMILIES[name])
    swap_routers(model, L2RConfig(rank=8, heads=4))
    result = fit_routers(model, batches(10, seed=1), report=lambda *_: None)
    for layer in result.layers:
        assert layer.divergence < layer.divergence_before


def test_the_level_of_logits_is_learned_where_each_expert_has_a_gate_of_its_own():
    """A softmax is blind to what all logits of a token have in common, a sigmoid is not."""
    model = tiny_model(FAMILIES["deepseek_v3"])
    with torch.no_grad():
        for site in router_sites(model):
            old_weight(site).add_(0.4 * torch.randn(1, TINY["hidden_size"]))
    swap_routers(model, LinearConfig())
    options = FitOptions(updates=8, lr=0.05)
    result = fit_routers(model, batches(20, seed=1), options=options, report=lambda *_: None)
    for layer in result.layers:
        assert layer.divergence < 0.2 * layer.divergence_before


def test_only_the_routers_change(swapped):
    before = {k: v.clone() for k, v in swapped.state_dict().items()}
    fit_routers(swapped, batches(3, seed=1), report=lambda *_: None)
    for key, value in swapped.state_dict().items():
        assert torch.equal(before[key], value) is (".gate." not in key), key
    assert isinstance(swapped.model.layers[0].mlp.gate, nn.Module)
    assert_close(before["lm_head.weight"], swapped.lm_head.weight)


def test_a_constrained_router_keeps_its_constraint_in_a_fit(trained):
    """TorchScale's X-MoE gives each anchor a fixed norm after every step."""
    model = swap_routers(copy.deepcopy(trained), XMoEConfig(rank=4, anchor_norm=0.5))
    before = [site.router.anchors.norm(dim=-1).clone() for site in router_sites(model)]
    start = [site.router.anchors.detach().clone() for site in router_sites(model)]
    fit_routers(model, batches(4, seed=1), held_out=batches(1, seed=2))
    for site, norms, old in zip(router_sites(model), before, start, strict=True):
        assert not torch.equal(site.router.anchors, old)
        assert_close(site.router.anchors.norm(dim=-1), norms)
