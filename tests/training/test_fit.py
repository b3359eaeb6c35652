"""A swap, then a fit: the new routers decide as the old ones, on text that the fit has not seen."""

import copy
import re

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast

from l2r import L2RConfig, LinearConfig, fit_routers, swap_routers
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.swap import UntrainedRoutersWarning, unfitted_sites
from l2r.training.fit import FitOptions
from l2r.training.fit_batches import perplexity
from l2r.training.upcycling import upcycle
from tests.hf.families import tiny_model
from tests.training.test_upcycle import CONFIG, batches, trained

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
        with pytest.raises(ValueError, match="l2r swap CKPT --fit TEXT"):
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


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_routers_of_other_families_are_fitted(name):
    model = tiny_model(FAMILIES[name])
    swap_routers(model, L2RConfig(rank=8, heads=4))
    result = fit_routers(model, batches(10, seed=1), report=lambda *_: None)
    for layer in result.layers:
        assert layer.divergence < layer.divergence_before


def test_only_the_routers_change(swapped):
    before = {k: v.clone() for k, v in swapped.state_dict().items()}
    fit_routers(swapped, batches(3, seed=1), report=lambda *_: None)
    for key, value in swapped.state_dict().items():
        assert torch.equal(before[key], value) is (".gate." not in key), key
    assert isinstance(swapped.model.layers[0].mlp.gate, nn.Module)
    assert_close(before["lm_head.weight"], swapped.lm_head.weight)
