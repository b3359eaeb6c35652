"""Selection biases of every family move by the loads of a step, as written out here."""

import copy

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from l2r import L2RConfig, bias_balancing
from l2r.hf.models.version_names import checkpoint_activations
from l2r.hf.swap import find_sites, rules, selection_biases, shard_routers, swap_routers
from l2r.hf.swap.families import FAMILIES
from l2r.routers import capture
from tests.hf.families import each_rule, each_rule_and_dtype, sample_tokens, tiny_model
from tests.processes import Running, on_ranks
from tests.routers.test_capture import model_of

UNBIASED = [
    rules.normalized_by_flag, rules.always_normalized, rules.cohere2, rules.phimoe,
    rules.deepseek_v2, rules.openai_privacy_filter, rules.mistral4, rules.mistral_large4,
    rules.flint,
]  # fmt: skip
OTHERS = [name for name, family in FAMILIES.items() if family.rule in UNBIASED]
BIASED = [name for name in FAMILIES if name not in OTHERS]


def batches():
    ids = sample_tokens(4)
    mask = torch.ones_like(ids)
    mask[3, 5:] = 0
    return [{"input_ids": ids[a:b], "attention_mask": mask[a:b]} for a, b in ((0, 1), (1, 4))]


def loads_by_hand(model, inputs):
    """Tokens of each expert that no padding chose, from what capture gives."""
    found = {}
    for batch in inputs:
        with torch.no_grad(), capture(model) as captured:
            model(**batch, use_cache=False)
        keep = batch["attention_mask"].flatten().bool()
        for path, outputs in captured.outputs.items():
            for output in outputs:
                experts, chosen = output.logits.shape[1], output.indices[keep].flatten()
                found[path] = found.get(path, 0) + torch.bincount(chosen, minlength=experts)
    return found


@each_rule_and_dtype(BIASED)
def test_a_step_moves_each_bias_by_the_loads_of_its_micro_batches(name, dtype, tmp_path):
    model = model_of(name, dtype, tmp_path)
    balancing = bias_balancing(model, speed=0.001)
    before = {path: bias.clone() for path, bias in selection_biases(model).items()}
    assert before and all(bias.dtype == torch.float32 for bias in before.values())
    expected = loads_by_hand(model, batches())  # without gradients: these calls do not count
    for batch in batches():
        model(**batch, use_cache=False)
    balancing.step()
    for path, bias in selection_biases(model).items():
        load = expected[path].double()
        moved = -0.001 * torch.sign(load - load.mean())
        torch.testing.assert_close(bias, before[path] + moved.float(), rtol=0, atol=1e-7)
        assert moved.any(), path
    before = {path: bias.clone() for path, bias in selection_biases(model).items()}
    balancing.step()  # of no call
    assert all(torch.equal(b, before[p]) for p, b in selection_biases(model).items())
    numbers = balancing.numbers()
    assert set(numbers) == {"bias_balancing/max_over_mean", "bias_balancing/bias_span"}
    hooks = [len(site.router._forward_hooks) for site in find_sites(model)]
    balancing.stop()
    assert [len(s.router._forward_hooks) + 1 for s in find_sites(model)] == hooks


@pytest.mark.parametrize("name", each_rule(OTHERS))
def test_other_families_are_refused_with_the_two_remedies(name):
    with pytest.raises(ValueError, match=r"add_router_losses.*selection_bias=True") as found:
        bias_balancing(tiny_model(FAMILIES[name]))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_the_second_remedy_works(name):
    config = L2RConfig(rank=2, heads=4, selection_bias=True)
    model = swap_routers(tiny_model(FAMILIES[name]), config, selection="router")
    with bias_balancing(model, speed=0.5) as balancing:
        model(sample_tokens(), use_cache=False)
        balancing.step()
    assert all(bias.abs().max() == 0.5 for bias in selection_biases(model).values())


def test_balancing_evens_the_loads_out():
    model = tiny_model(FAMILIES["deepseek_v3"])
    for bias in selection_biases(model).values():
        bias.zero_()
    ids, peaks = sample_tokens(8), []
    with bias_balancing(model, speed=0.02) as balancing:
        for _ in range(40):
            model(ids, use_cache=False)
            balancing.step()
            peaks.append(balancing.numbers()["bias_balancing/max_over_mean"])
    assert peaks[0] > 1.5 and sum(peaks[-10:]) / 10 - 1 < 0.5 * (peaks[0] - 1)


@pytest.mark.parametrize("name", ["lfm2_moe", "ernie4_5_moe"])
def test_updates_are_not_lost_in_half_precision_and_are_saved(name, tmp_path):
    """Steps of 1e-4 at 0.3, where neighbors in bfloat16 are 2e-3 apart."""
    model = tiny_model(FAMILIES[name]).to(torch.bfloat16)
    start = {path: bias.float().clone() for path, bias in selection_biases(model).items()}
    with bias_balancing(model, speed=1e-4) as balancing:
        for _ in range(20):
            model(sample_tokens(), use_cache=False)
            balancing.step()
    now = selection_biases(model)
    assert all((now[p] - start[p]).abs().max() > 1e-3 for p in now)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32)
    for path, bias in selection_biases(again).items():
        assert torch.equal(bias, now[path])
    half = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half(sample_tokens(), use_cache=False).logits.isfinite().all()


def test_recomputed_layers_count_once():
    model = tiny_model(FAMILIES["deepseek_v3"]).train()
    plain = copy.deepcopy(model)
    checkpoint_activations(model)
    for one in (model, plain):
        with bias_balancing(one) as balancing:
            one(sample_tokens(), use_cache=False).logits.sum().backward()
            balancing.step()
    first, second = selection_biases(model), selection_biases(plain)
    assert all(torch.equal(first[p], second[p]) for p in first)


def test_settings_that_move_nothing_are_refused():
    for speed in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="speed must be > 0 and finite"):
            bias_balancing(tiny_model(FAMILIES["deepseek_v3"]), speed=speed)


def on_a_rank(folder):
    rank = torch.distributed.get_rank()
    model = tiny_model(FAMILIES["deepseek_v3"])
    with bias_balancing(model) as balancing:
        model(**batches()[rank], use_cache=False)
        balancing.step()
    torch.save(selection_biases(model), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow("two processes")
def test_ranks_sum_their_loads(tmp_path):
    on_ranks(2, tmp_path / "output", Running, _on_two, tmp_path)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    model = tiny_model(FAMILIES["deepseek_v3"])
    with bias_balancing(model) as balancing:
        for batch in batches():
            model(**batch, use_cache=False)
        balancing.step()
    whole = selection_biases(model)
    assert all(torch.equal(one[p], whole[p]) and torch.equal(two[p], whole[p]) for p in whole)


def _on_two(folder):
    torch.distributed.init_process_group("gloo")
    on_a_rank(folder)


def _sharded(folder):
    torch.distributed.init_process_group("gloo")
    rank, found = torch.distributed.get_rank(), {}
    for name in ("ernie4_5_moe", "deepseek_v3", "lfm2_moe"):
        model = tiny_model(FAMILIES[name]).to(torch.bfloat16)
        balancing = bias_balancing(model)
        shard_routers(model)
        for layer in model.model.layers:
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(model)
        model(**batches()[rank], use_cache=False)
        balancing.step()
        found[name] = {
            path: getattr(bias, "full_tensor", lambda bias=bias: bias)().detach().view(-1)
            for path, bias in balancing.biases.items()
        }
    torch.save(found, folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow("two processes")
def test_biases_of_sharded_models_move_alike_on_all_ranks(tmp_path):
    on_ranks(2, tmp_path / "output", Running, _sharded, tmp_path)
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for name, biases in one.items():
        start = selection_biases(tiny_model(FAMILIES[name]).to(torch.bfloat16))
        for path, bias in biases.items():
            assert torch.equal(bias, two[name][path])
            assert bias.dtype == torch.float32
            moved = (bias - start[path].float()).abs()
            assert moved.max() == pytest.approx(1e-3, rel=1e-3), (name, path)
