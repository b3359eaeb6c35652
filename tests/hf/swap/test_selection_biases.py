"""The selection bias of every family is found, wherever it is kept, and moves what is chosen."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from l2r import L2RConfig
from l2r.analysis.diagnostics.checks import check_model
from l2r.functional import expert_counts
from l2r.hf.swap import bias_balancing, running_sites, selection_biases
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.swap import replace_routers
from l2r.routers.selection_bias import update_selection_bias
from tests.hf.families import sample_tokens, tiny_model
from tests.tiers import few

OF_BLOCKS = ("minimax_m2", "lfm2_moe", "afmoe", "hy_v3")
OF_ROUTERS = (
    *("ernie4_5_moe", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "dots1"),
    *("solar_open", "exaone_moe", "nemotron_h", "laguna", "minimax_m3_vl_text", "step3p7"),
    *("muse_spark", "kolibri1", "inkling2_text", "inkling2_loop_text", "longcat_flash", "beam"),
    *("glm_moe_dsa", "glm5_next", "glm4v_moe", "kimi_linear", "hy_v4", "hy_v4_vl", "axk1", "axk2"),
    *("bailing_hybrid", "dots3_note_text", "mimo_v2_flash", "ernie4_5_vl_moe", "deepseek_v4"),
)
OTHERS = sorted(FAMILIES.keys() - {*OF_BLOCKS, *OF_ROUTERS})
FAST = [(name, False) for name in (*OF_BLOCKS, "ernie4_5_moe")]
FAST += [(name, True) for name in (*OF_BLOCKS, "deepseek_v3")]
CASES = [(name, swapped) for name in (*OF_BLOCKS, *OF_ROUTERS) for swapped in (False, True)]


def build(name, swapped=False, **sizes):
    model = tiny_model(FAMILIES[name], **sizes)
    return replace_routers(model, L2RConfig(rank=4, heads=2)) if swapped else model


def with_bias(model):
    """Routers that run, but for DeepSeek-V4's first, which choose by the ids of tokens."""
    return [site for site in running_sites(model) if not site.by_token]


def first_router(model, ids):
    """The first router and what it is called with, a bias of its block included."""
    site, seen = with_bias(model)[0], []
    hook = site.router.register_forward_pre_hook(lambda module, args: seen.append(args))
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    hook.remove()
    return site, seen[0]


@pytest.mark.parametrize(("name", "swapped"), few(CASES, FAST, "every family with a bias"))
def test_the_remedy_that_check_names_balances_every_family(name, swapped):
    """Steps of it on the same tokens: the largest load comes nearer to the mean than halfway."""
    model, ids = build(name, swapped), sample_tokens(8)
    biases = selection_biases(model)
    assert set(biases) == {site.path for site in with_bias(model)}
    found = {each.check: each for each in check_model(model, {"input_ids": ids})}
    adds_loss = hasattr(model, "router_aux_loss_coef") or name == "glm4v_moe"  # in its wrapper
    if not adds_loss:
        assert found["auxiliary loss"].status == "warning"
        assert "add_bias_balancing(trainer)" in found["auxiliary loss"].remedy
    assert "l2r.bias_balancing(model)" in found["auxiliary loss"].remedy
    with bias_balancing(model):
        finding = {each.check: each for each in check_model(model, {"input_ids": ids})}
    assert finding["auxiliary loss"].status == "ok"
    assert "moves its selection bias" in finding["auxiliary loss"].found
    site, given = first_router(model, ids)
    counts = []
    with torch.no_grad():
        for _ in range(60):
            counts.append(expert_counts(site.router(*given)[2], 8))
            update_selection_bias(biases[site.path], counts[-1], speed=0.02)
    fair = ids.numel() * 2 / 8
    later = torch.stack(counts[-10:]).double().mean(0)  # equals take turns
    assert counts[0].max() > 1.5 * fair
    assert later.max() - fair < 0.5 * (counts[0].max() - fair)


@pytest.mark.parametrize("name", few(OTHERS, ["mixtral", "deepseek_v2"], "every other family"))
def test_other_families_have_none(name):
    assert selection_biases(build(name)) == selection_biases(build(name, True)) == {}


def test_a_family_whose_configuration_leaves_the_bias_out_has_none():
    model = build("lfm2_moe", use_expert_bias=False)
    assert selection_biases(model) == {}
    found = {each.check: each for each in check_model(model)}["auxiliary loss"]
    assert found.status == "warning" and "nothing balances" in found.found


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks for it
def test_the_bias_of_a_block_is_found_where_peft_trains_a_copy_of_the_router():
    model = build("minimax_m2", True)
    expected = [bias.data_ptr() for bias in selection_biases(model).values()]
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["gate"]))
    assert [bias.data_ptr() for bias in selection_biases(adapted).values()] == expected


@pytest.mark.parametrize("name", OF_BLOCKS)
def test_check_looks_at_the_bias_of_a_block(name):
    model = build(name)
    for bias in selection_biases(model).values():
        bias.zero_()
    assert status(model, "selection bias") == status(model, "weights") == "ok"
    alone = copy.deepcopy(model)
    for bias in selection_biases(alone).values():
        bias[:3] = 1.5
    assert status(alone, "selection bias") == "fault"
    for site in running_sites(model):
        site.router.register_forward_hook(worst(site.selection))
    assert status(model, "weights") == "fault"


def status(model, check):
    return {each.check: each.status for each in check_model(model)}[check]


def worst(rule):
    """A hook that chooses the k worst experts, weighed by the rule."""

    def hook(router, args, out):
        chosen = out[0].topk(out[2].shape[1], largest=False).indices
        return out[0], rule.weigh(router, out[0], chosen), chosen

    return hook
