"""Models that look odd and are right: half precision, adapters, wrappers, frozen parts."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from l2r import L2RConfig, LinearConfig
from l2r.analysis.diagnostics.checks import check_model
from l2r.hf.checkpoints import load_pretrained
from l2r.hf.swap import freeze_routers, train_routers_only
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import old_weight, router_sites
from l2r.hf.swap.swap import replace_routers
from l2r.routers import router_names
from tests.hf.families import FAULTS, from_folder, tiny_model
from tests.hf.routes.models import own_model
from tests.hf.swap.test_composite_models import llava, qwen
from tests.tiers import few_families


def statuses(model, batch=None, **options):
    return {found.check: found.status for found in check_model(model, batch, **options)}


def found_by_name(model, batch=None, **options):
    return {found.check: found for found in check_model(model, batch, **options)}


def unwell(model, batch=None, **options):
    """Checks that are neither ok nor skipped."""
    found = statuses(model, batch, **options).items()
    return {name: status for name, status in found if status not in ("ok", "skipped")}


def with_loss(name="qwen3_moe"):
    model = tiny_model(FAMILIES[name])
    model.config.output_router_logits = True
    return model


@torch.no_grad()
def test_experts_that_tie_in_half_precision_may_be_chosen_in_any_order():
    """Experts are copies of two, and torch.topk, as the family calls, has no order of equals."""
    model = with_loss("flex_olmo").bfloat16()
    for site in router_sites(model):
        site.router.weight[2:] = site.router.weight[:2].repeat(3, 1)

        def swap_equals(router, args, out):
            return out[0], out[1], (out[2] + 2) % 8

        site.router.register_forward_hook(swap_equals)
    assert statuses(model)["weights"] == "ok"


def test_a_sparse_mixer_in_training_is_judged_as_it_evaluates():
    """Its router draws experts while it trains, which is neither a fault nor a draw for a check."""
    model = with_loss("phimoe").train()
    before = torch.get_rng_state()
    assert statuses(model)["weights"] == "ok"
    assert torch.equal(torch.get_rng_state(), before)
    assert all(part.training for part in model.modules())


def test_padding_loads_no_expert():
    """Three quarters of a batch are one token, whose experts are not overloaded by it."""
    model, ids = with_loss(), torch.randint(3, 64, (4, 128))
    mask = torch.zeros_like(ids)
    mask[:, :32] = 1
    batch = {"input_ids": torch.where(mask.bool(), ids, 1), "attention_mask": mask}
    assert statuses(model, batch)["loads"] == "ok"
    everywhere = {**batch, "attention_mask": torch.ones_like(mask)}
    assert statuses(model, everywhere)["loads"] == "warning"


@torch.no_grad()
def test_groups_that_tie_may_be_chosen_in_any_order():
    """Groups of equal sums, though no expert of one has the logit or score of another's."""
    model = tiny_model(FAMILIES["deepseek_v3"])
    for site in router_sites(model):
        assert (site.selection.groups, site.selection.kept_groups) == (2, 1)
        assert (site.sizes["num_experts"], site.sizes["top_k"]) == (8, 2)
        site.router.weight.zero_()  # sigmoids of the first two of each group are 0 or 1
        site.router.weight[[0, 1]] = 1e5 * torch.randn(32)
        site.router.weight[[4, 5]] = 2 * site.router.weight[0]
        bias = torch.full((8,), -0.9)
        bias[[0, 1, 4, 5]] = torch.tensor([0.25, 0.0, 0.125, 0.125])
        site.router.e_score_correction_bias.copy_(bias)

        def take_the_second(router, args, out):
            return out[0], out[1], out[2] % 4 + 4

        site.router.register_forward_hook(take_the_second)
    assert statuses(model)["weights"] != "fault"


def test_a_sparse_mixer_whose_tokens_are_all_decided_is_no_fault():
    """Experts outside of its window have no part in a weight, which is 1 without a gradient."""
    model = with_loss("phimoe")
    assert statuses(model)["gradient"] == "ok"
    with torch.no_grad():
        for site in router_sites(model):
            steps = torch.arange(8.0)[:, None] - 3.5  # the best two are apart by 28% or more
            site.router.weight.copy_(steps * torch.randn(32))
    batch = {"input_ids": torch.arange(3, 35).view(2, 16)}
    (found,) = (finding for finding in check_model(model, batch) if finding.check == "gradient")
    assert (
        found.status == "warning" and "SparseMixer gave every token in layers 0, 1" in found.found
    )


def test_a_report_names_every_check_before_it_runs():
    seen = []
    found = check_model(with_loss(), report=lambda *now: seen.append(now))
    names = [finding.check for finding in found]
    assert seen == [(n, len(names), name) for n, name in enumerate([*names, ""])]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks for it
def test_adapters_are_as_they_should_be():
    """LoRA begins with a factor of zeros, which gives the other one no gradient at first."""
    modules_to_save = LoraConfig(target_modules=["q_proj"], modules_to_save=["gate"])
    assert unwell(get_peft_model(with_loss(), modules_to_save)) == {}
    on_routers = get_peft_model(with_loss("hunyuan_v1_moe"), LoraConfig(target_modules=["wg"]))
    assert unwell(on_routers, balance=0.01) == {}
    beside = get_peft_model(with_loss(), LoraConfig(target_modules=["q_proj"]))
    assert unwell(beside) == {"trainable": "warning"}


@pytest.mark.parametrize("normalize", [False, True])
def test_the_one_expert_of_a_layer_needs_no_gradient_of_its_router(normalize):
    """Softmax over one score is 1 whatever the score is."""
    sizes = {"num_experts": 1, "num_experts_per_tok": 1, "norm_topk_prob": normalize}
    model = tiny_model(FAMILIES["olmoe"], **sizes)
    model.config.output_router_logits = True
    found = {finding.check: finding for finding in check_model(model)}
    assert found["gradient"].status == "skipped" and "two experts" in found["gradient"].found
    assert unwell(model) == {}


@pytest.mark.parametrize("swapped", [False, True])
def test_the_balance_loss_of_a_wrapper_is_asked_for_and_compared(swapped):
    """It keeps the weight in the text's configuration alone, which its forward reads."""
    model, ids = qwen().eval(), torch.randint(3, 64, (4, 48))
    if swapped:
        replace_routers(model, L2RConfig(rank=2, heads=2))
    off = found_by_name(model, {"input_ids": ids})
    assert off["auxiliary loss"].status == "warning" and "off:" in off["auxiliary loss"].found
    with torch.no_grad():
        without = model(input_ids=ids, labels=ids).loss
        model.config.text_config.output_router_logits = True
        output = model(input_ids=ids, labels=ids)
    found = found_by_name(model, {"input_ids": ids})
    weight = model.config.text_config.router_aux_loss_coef
    torch.testing.assert_close(output.loss, without + weight * output.aux_loss)
    assert f"on, with router_aux_loss_coef={weight:g}" in found["auxiliary loss"].found
    assert f"{weight:g} x balance loss {float(output.aux_loss):.4f}" in found["loss"].found
    for name in ("auxiliary loss", "loss", "padding in the loss", "balance gradient"):
        assert found[name].status == "ok", found[name]
    twice = found_by_name(model, {"input_ids": ids}, balance=0.01)["auxiliary loss"]
    assert twice.status == "warning" and "both count" in twice.remedy


def test_a_wrapper_that_adds_no_loss_is_said_to_have_none():
    """LLaVA around a Mixtral, whose own wrapper would add one."""
    model = llava().eval()
    model.config.text_config.output_router_logits = True
    ids = torch.randint(3, 32, (4, 48))
    found = found_by_name(model, {"input_ids": ids})
    assert "no balance loss in transformers" in found["auxiliary loss"].found
    assert {found[n].status for n in ("loss", "padding in the loss", "balance gradient")} == {
        "skipped"
    }


def test_what_trains_is_no_fault():
    model = with_loss()
    train_routers_only(model)
    assert unwell(model) == {}
    model.requires_grad_(True)
    freeze_routers(model)
    assert unwell(model) == {"trainable": "warning"}
    model.requires_grad_(False)
    assert unwell(model) == {}
    assert statuses(model)["trainable"] == "skipped"


class Wrapper(nn.Module):
    """What DistributedDataParallel looks like."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_wrappers_and_batches_of_a_data_loader_are_taken():
    ids = torch.randint(3, 64, (4, 64))
    mask = torch.ones_like(ids)
    mask[1, 40:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids}
    assert unwell(Wrapper(with_loss().train()), batch) == {}
    assert unwell(torch.compile(with_loss(), backend="eager"), batch) == {}


@pytest.mark.parametrize("name", few_families(FAMILIES))
def test_no_family_is_at_fault(name, tmp_path):
    """Of new models, in both precisions; loads are skipped, since no text is given."""
    for dtype in (torch.float32, torch.bfloat16):
        model = from_folder(name, tmp_path / str(dtype), dtype)
        model.config.output_router_logits = True
        found = unwell(model, balance=0.0)
        faults = {check for check, status in found.items() if status == "fault"}
        assert faults == FAULTS.get(name, set()), found
        allowed = (
            {"auxiliary loss"} if dtype is torch.float32 else {"auxiliary loss", "selection bias"}
        )
        assert set(found) - faults <= allowed, found


def test_a_swapped_model_that_was_trained_without_a_fit_is_trained():
    model = replace_routers(with_loss(), L2RConfig(rank=4, heads=4))
    assert statuses(model)["trained"] == "warning"
    ids = torch.randint(3, 64, (4, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert statuses(model)["trained"] == "ok"


@pytest.mark.parametrize(
    ("config", "status"), [(LinearConfig(), "ok"), (L2RConfig(rank=4, heads=4), "warning")]
)
def test_a_loaded_router_is_untrained_by_what_a_draw_leaves_constant(config, status, tmp_path):
    """A linear router has nothing of that kind: nobody can say whether it was trained."""
    replace_routers(with_loss(), config).save_pretrained(tmp_path)
    assert statuses(load_pretrained(tmp_path))["trained"] == status


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "ernie4_5_moe", "mixtral"])
def test_scores_that_saturate_are_a_warning_and_no_replaced_forward(name):
    """Equal scores are ties, which a family's topk breaks in another order than the rule."""
    model = tiny_model(FAMILIES[name]).eval()
    healthy = findings(model)["weights"]
    assert healthy.status == "ok"
    with torch.no_grad():
        for site in router_sites(model):
            old_weight(site).mul_(3000 / old_weight(site).std())
    found = findings(model)["weights"]
    assert found.status == "warning" and "are saturated" in found.found


@pytest.mark.parametrize("kind", router_names())
def test_a_router_of_ours_with_a_selection_bias_selects_as_its_configuration_says(kind):
    model = own_model(kind=kind, selection_bias=True).eval()
    assert statuses(model)["selection"] == "ok"


@pytest.mark.parametrize("name", ["glm4_moe", "ernie4_5_moe"])
def test_a_selection_bias_that_was_rounded_to_bfloat16_is_a_warning(name):
    model = tiny_model(FAMILIES[name]).eval()
    draw = torch.Generator().manual_seed(0)
    for stored, status in ((torch.float32, "ok"), (torch.bfloat16, "warning")):
        for site in router_sites(model):
            bias = site.selection.held_bias(site.router)
            values = 6.8 + 0.25 * torch.rand(bias.shape, generator=draw)
            with torch.no_grad():
                bias.copy_(values.to(stored))
        assert findings(model)["selection bias"].status == status
    assert "in steps of 0.031 at" in findings(model)["selection bias"].found
    with torch.no_grad():  # one step of updates: bfloat16 has numbers so near to 0
        for site in router_sites(model):
            site.selection.held_bias(site.router).uniform_(-1e-3, 1e-3).copy_(
                site.selection.held_bias(site.router).bfloat16()
            )
    assert findings(model)["selection bias"].status == "ok"


def findings(model):
    batch = {"input_ids": torch.randint(3, 64, (4, 64), generator=torch.Generator().manual_seed(1))}
    return {finding.check: finding for finding in check_model(model, batch)}
