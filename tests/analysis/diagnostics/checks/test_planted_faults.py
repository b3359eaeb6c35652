"""Faults planted into stock and swapped models of five families: each is caught, health is silent.

A fault is a function that plants it, and the check that must name it. The models are those of the
table of families; their swapped forms are fitted, so that nothing is wrong with them.
"""

import contextlib
import copy
import functools
import math
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from l2r import L2RConfig, fit_routers
from l2r.analysis.diagnostics.checks import check_model
from l2r.fitting.fit import FitOptions
from l2r.hf.swap import bias_balancing, selection_biases
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import router_sites
from l2r.hf.swap.swap import replace_routers
from l2r.routers import Router
from tests.hf.families import tiny_model
from tests.tiers import few

NAMES = ("olmoe", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
KINDS = [f"{how} {name}" for name in NAMES for how in ("stock", "swapped")]
FEW = ("stock deepseek_v3", "swapped mixtral")
AttentionInterface.register("l2r_test_without_masks", sdpa_attention_forward)


def text(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 64, (4, 64), generator=generator)


@functools.cache
def healthy(kind):
    return build(*kind.split())


def build(how, name):
    model = tiny_model(FAMILIES[name])
    model.config.output_router_logits = True
    for site in router_sites(model):
        if site.selection.bias:  # a bias that nothing has moved yet, as in a new model
            site.router.e_score_correction_bias.zero_()
    if how == "swapped":
        replace_routers(model, L2RConfig(rank=8, heads=4, gamma=4.0))
        batches = [text(seed) for seed in range(2, 8)]
        fit_routers(model, batches, options=FitOptions(updates=2), report=lambda *_: None)
    return model


@pytest.fixture
def planted(request):
    """A copy of a healthy model."""
    return copy.deepcopy(healthy(request.param))


def routers(model):
    return [site.router for site in router_sites(model)]


def first_weight(router):
    return next(p for name, p in router.named_parameters() if "norm" not in name)


@torch.no_grad()
def nan(model):
    first_weight(routers(model)[-1]).flatten()[3] = math.nan


def half(model):
    """Of ours; a stock router in half precision inside of a float32 model does not run."""
    for router in routers(model):
        router.bfloat16()


def eight_bits(model):
    weight = first_weight(routers(model)[0])
    weight.data = weight.data.to(torch.float8_e4m3fn)


def edited_top_k(model):
    model.config.num_experts_per_tok = 3


def other_weights(model):
    for router in routers(model):
        router.register_forward_hook(lambda m, a, out: (out[0], out[1] * 1.1, out[2]))


def other_experts(model):
    """The worst k, with the weights that the rule gives them."""
    for site in router_sites(model):

        def hook(router, args, out, rule=site.selection):
            worst = out[0].topk(out[2].shape[1], largest=False).indices
            return out[0], rule.weigh(router, out[0], worst), worst

        site.router.register_forward_hook(hook)


@torch.no_grad()
def one_direction(model):
    """All hidden states agree in the one channel that the routers read."""
    model.get_input_embeddings().weight[:, 0] = 100.0
    for router in routers(model):
        weight = router.projection.weight if isinstance(router, Router) else router.weight
        column = weight[:, 0].clone()
        weight.zero_()
        weight[:, 0] = column


@torch.no_grad()
def nothing_set(model):
    for router in routers(model):
        (router.anchors if isinstance(router, Router) else router.weight).zero_()


def frozen(model):
    for parameter in routers(model)[0].parameters():
        parameter.requires_grad_(False)


def detached(model):
    for router in routers(model):
        router.register_forward_hook(lambda m, a, out: (out[0], out[1].detach(), out[2]))


def cut_for_a_log(model):
    """A wrapper that hands logits to a log: the balance loss has its value and no gradient."""
    for router in routers(model):
        router.register_forward_hook(lambda m, a, out: (out[0].detach(), *out[1:]), prepend=True)


def reentrant(model):
    model.activation_checkpointing_enable({"use_reentrant": True})


def no_masks(model):
    model.config._attn_implementation = "l2r_test_without_masks"


def raises(model):
    routers(model)[0].register_forward_hook(lambda m, a, out: out[:2])


def off(model):
    model.config.output_router_logits = False


def edited_weight(model):
    model.config.router_aux_loss_coef = 0.5


def negative_weight(model):
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = -0.1


def zero_weight(model):
    model.config.router_aux_loss_coef = model.router_aux_loss_coef = 0.0


def counts_other_experts(model):
    model.num_experts_per_tok = 1


def kept_groups(model):
    for router in routers(model):
        if isinstance(router, Router):
            router.selection = replace(router.selection, kept_groups=2)
        else:
            router.topk_group = 2


def biased(model):
    for router in routers(model):
        router.e_score_correction_bias[:3] = 1.5


def narrow_bias(model):
    for router in routers(model):
        router.e_score_correction_bias = router.e_score_correction_bias.bfloat16()


EVERYWHERE = {
    "NaN in a weight": (nan, "finite", "fault"),
    "router in bfloat16 alone": (half, "dtype", "warning"),
    "router in 8 bits": (eight_bits, "quantized", "fault"),
    "top-k edited after the model was built": (edited_top_k, "selection", "fault"),
    "weights scaled by a hook": (other_weights, "weights", "fault"),
    "experts replaced by a hook": (other_experts, "weights", "fault"),
    "all tokens to the same experts": (one_direction, "loads", "fault"),
    "router weights never set": (nothing_set, "trained", "fault"),
    "a frozen router": (frozen, "trainable", "warning"),
    "weights detached": (detached, "gradient", "fault"),
    "attention without masks": (no_masks, "padding", "fault"),
    "a router with another contract": (raises, "runs", "fault"),
    "reentrant checkpointing": (reentrant, "checkpointing", None),
}
WITH_A_LOSS = {
    "balance loss off": (off, "auxiliary loss", "warning"),
    "balance loss of weight 0": (zero_weight, "auxiliary loss", "warning"),
    "loss weight edited after the model was built": (edited_weight, "auxiliary loss", "fault"),
    "negative loss weight": (negative_weight, "auxiliary loss", "fault"),
    "balance loss of other experts": (counts_other_experts, "loss", "fault"),
    "router logits detached for a log": (cut_for_a_log, "balance gradient", "fault"),
}
WITH_A_BIAS = {
    "groups that config.json does not say": (kept_groups, "selection", "fault"),
    "a selection bias that decides alone": (biased, "selection bias", "fault"),
    "a selection bias in bfloat16": (narrow_bias, "selection bias", "warning"),
}


def check(model, **options):
    """Findings by the name of the check."""
    return {found.check: found for found in check_model(model, {"input_ids": text()}, **options)}


@pytest.mark.parametrize("kind", few(KINDS, FEW, "every family"))
def test_a_healthy_model_is_silent(kind):
    """And stays as it was: weights, gradients, mode."""
    model = healthy(kind)
    model.zero_grad()  # of the fit
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moved = bool(selection_biases(model)) and not hasattr(model, "router_aux_loss_coef")
    with bias_balancing(model) if moved else contextlib.nullcontext():
        findings = check(model)
    assert {f.status for f in findings.values()} <= {"ok", "skipped"}, findings
    skipped = {name for name, f in findings.items() if f.status == "skipped"}
    names = {"loss", "padding in the loss", "balance gradient"}
    no_loss = names if "deepseek" in kind else set()
    assert skipped == no_loss
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert modes == [module.training for module in model.modules()]


CASES = [
    *((kind, name) for kind in KINDS for name in EVERYWHERE),
    *((kind, name) for kind in KINDS if "deepseek" not in kind for name in WITH_A_LOSS),
    *((kind, name) for kind in KINDS if "deepseek" in kind for name in WITH_A_BIAS),
]


IS_FEW = lambda case: case[0] in FEW  # noqa: E731


@pytest.mark.parametrize(
    ("planted", "name"), few(CASES, IS_FEW, "every family"), indirect=["planted"]
)
def test_a_planted_fault_is_named(planted, name):
    plant, caught_by, status = {**EVERYWHERE, **WITH_A_LOSS, **WITH_A_BIAS}[name]
    plant(planted)
    finding = check(planted)[caught_by]
    if status is None:  # a fault where losses are on or routers are ours
        bare = not getattr(planted, "router_aux_loss_coef", 0) and not any(
            isinstance(router, Router) for router in routers(planted)
        )
        status = "warning" if bare else "fault"
    assert (finding.status, bool(finding.remedy)) == (status, True), finding


@pytest.mark.parametrize("planted", ["stock mixtral"], indirect=True)
@pytest.mark.parametrize("loss", ["on", "off"])
def test_reentrant_checkpointing_is_a_fault_of_stock_routers_with_their_loss_on(planted, loss):
    planted.config.output_router_logits = loss == "on"
    reentrant(planted)
    assert check(planted)["checkpointing"].status == ("fault" if loss == "on" else "warning")


@pytest.mark.parametrize("planted", ["stock deepseek_v3"], indirect=True)
def test_a_selection_bias_decides_alone_among_experts_of_a_group(planted):
    """A bias of one whole group chooses the group, and scores choose in it."""
    for router in routers(planted):
        router.n_group, router.topk_group = 2, 1
    planted.config.n_group, planted.config.topk_group = 2, 1
    biases = [router.e_score_correction_bias for router in routers(planted)]
    for bias in biases:
        bias.zero_()
        bias.view(2, -1)[1] = 2.0
    assert check(planted)["selection bias"].status == "ok"
    top_k = planted.config.num_experts_per_tok
    for bias in biases:
        bias.zero_()
        bias.view(2, -1)[1, :top_k] = 2.0
    found = check(planted)["selection bias"]
    assert found.status == "fault", found


@pytest.mark.parametrize("planted", ["stock deepseek_v3", "swapped mixtral"], indirect=True)
def test_a_gradient_that_is_cut_is_named_of_the_loss_that_training_adds(planted):
    """A family without a loss of its own, and one whose own is off."""
    planted.config.output_router_logits = False
    assert check(planted, balance=0.01)["balance gradient"].status == "ok"
    cut_for_a_log(planted)
    found = check(planted, balance=0.01)
    assert found["balance gradient"].status == "fault"
    assert "reaches" not in found["balance gradient"].found
    own = "deepseek" not in type(planted).__name__.lower()
    assert check(planted)["balance gradient"].status == ("warning" if own else "skipped")


@pytest.mark.parametrize("planted", ["stock mixtral", "swapped mixtral"], indirect=True)
def test_padding_that_counts_in_the_balance_loss_is_named(planted, monkeypatch):
    module = sys.modules["transformers.models.mixtral.modeling_mixtral"]
    whole = module.load_balancing_loss_func
    monkeypatch.setattr(module, "load_balancing_loss_func", lambda *args: whole(*args[:3]))
    found = check(planted)
    assert found["padding in the loss"].status == "fault"
    assert "counts padding" in found["padding in the loss"].found
    assert found["loss"].status == "ok"  # of a batch without padding


WRAPPER = "stock qwen3_vl_moe"


@pytest.mark.parametrize(
    "kind", few([WRAPPER, *(k for k in KINDS if "stock" in k)], (WRAPPER, *FEW), "every family")
)
def test_a_swap_without_a_fit_is_named(kind):
    """In the process that swapped, and of a copy that remembers nothing."""
    model = replace_routers(copy.deepcopy(healthy(kind)), L2RConfig(rank=2, heads=4))
    for each in (model, copy.deepcopy(model)):
        assert check(each)["trained"].status == "warning"
