"""A swapped router chooses and weighs as the family's own does, whatever its logits are."""

import random

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from l2r import LinearConfig, RouterConfig
from l2r.hf.swap import swap_routers
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import Site, new_router, old_weight, router_sites
from l2r.routers.selection_rule import Selection
from tests.hf.families import TINY, matrix_of_logits, sample_tokens, tiny_model
from tests.tiers import few_families

EXPERTS, TOKENS = 8, 300
# Logits of every size: usual ones, and sigmoids so small that what is added to their sum counts.
LEVELS = {"usual": (0.0, 2.0), "tiny": (-13.0, 1.0)}


def passed_to(model: nn.Module, path: str) -> tuple[Tensor, ...]:
    """What the block passes to its router: hidden states, and a selection bias or nothing."""
    seen: list[tuple[Tensor, ...]] = []
    hook = model.get_submodule(path).register_forward_pre_hook(lambda _, args: seen.append(args))
    model(sample_tokens())
    hook.remove()
    return seen[0]


def table(output: tuple[Tensor, ...]) -> Tensor:
    """Weights [T, N], 0 for experts that were not chosen; the order of the k is left out."""
    _, weights, indices = output
    return torch.zeros(TOKENS, EXPERTS).scatter(1, indices, weights.float())


def without_ties(site: Site, logits: Tensor, *more: Tensor) -> Tensor:
    """Tokens [T] whose choice is not among equals, of which transformers takes any.

    A.X-K2's dropped experts all count as 0, and a sum of a score and a bias may round to a tie.
    """
    scores = site.selection.standing(site.router, logits, *more)
    best = scores.topk(site.sizes["top_k"] + 1, dim=-1).values
    return best[:, -2] != best[:, -1]


def draw_settings(router: nn.Module, draw: random.Random) -> None:
    """Change every setting that a family's rule may read, which defaults would hide."""
    values = {
        "routed_scaling_factor": draw.uniform(0.3, 3),
        "route_scale": draw.uniform(0.3, 3),
        "router_scaling_factor": draw.uniform(0.3, 3),
        "norm_topk_prob": draw.random() < 0.5,
        "expert_selection_fn": draw.choice(("softmax", "sigmoid")),
        "topk_method": draw.choice(("greedy", "group_limited_greedy")),
        "score_fn": draw.choice((ACT2FN["sigmoid"], ACT2FN["sqrtsoftplus"])),
    }
    groups, kept = draw.choice(((1, 1), (2, 1), (2, 2), (4, 1), (4, 3)))
    values |= {"num_group": groups, "topk_group": kept}
    if type(router).__name__ == "AXK2TopkRouter" and draw.random() < 0.5:
        values["num_group"] = None
    for name, value in values.items():
        if hasattr(router, name):
            setattr(router, name, value)
    for name, tensor in router.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.tensor([draw.gauss(0, 0.3) for _ in range(EXPERTS)]).view_as(tensor))


def test_a_family_that_bounds_a_sum_from_below_is_bounded_and_not_added_to():
    """ERNIE divides by max(sum, 1e-12); a bias chooses experts whose sum is of that size."""
    site = router_sites(tiny_model(FAMILIES["ernie4_5_moe"]))[0]
    with torch.no_grad():
        old_weight(site).copy_(torch.eye(EXPERTS, TINY["hidden_size"]))
        site.router.moe_statics.e_score_correction_bias[0, :2] = 2.0  # alone decides
        x = torch.zeros(TOKENS, TINY["hidden_size"])
        x[:, 2] = torch.linspace(20, 35, TOKENS)  # probabilities of the chosen: e^-20 to e^-35
        ours = new_router(site, LinearConfig())
        ours.weight.copy_(old_weight(site))
        theirs, swapped = table(site.router(x)), table(ours(x))
        _, _, indices = site.router(x)
        replayed = ours.selection.weigh(ours, ours(x)[0], indices)
    sums = theirs.sum(dim=1)
    assert (sums < 0.9).any() and (sums > 0.99).any()  # on both sides of the bound
    torch.testing.assert_close(swapped, theirs, atol=0, rtol=1e-5)
    torch.testing.assert_close(replayed, theirs.gather(1, indices), atol=0, rtol=1e-5)


@pytest.mark.parametrize("name", few_families(FAMILIES))
def test_a_family_keeps_its_choice_and_its_weights(name):
    model = tiny_model(FAMILIES[name])
    site = router_sites(model)[0]
    weight = torch.eye(EXPERTS, TINY["hidden_size"])  # the logits are the first entries of x
    with torch.no_grad():
        old_weight(site).copy_(weight)
    hidden, *more = passed_to(model, site.path)
    draw, inputs = torch.Generator().manual_seed(0), []
    for mean, std in LEVELS.values():
        x = torch.zeros(TOKENS, TINY["hidden_size"])
        x[:, :EXPERTS] = mean + std * torch.randn(TOKENS, EXPERTS, generator=draw)
        inputs.append(x.expand(1, -1, -1) if hidden.dim() == 3 else x)
    chance = random.Random(0)
    for drawn in range(13):
        if drawn:
            draw_settings(site.router, chance)
        router = new_router(site, LinearConfig())
        with torch.no_grad():
            router.weight.copy_(matrix_of_logits(site))
        for x in inputs:
            found, wanted = router(x, *more), site.router(x, *more)
            clear = without_ties(site, found[0], *more)
            torch.testing.assert_close(
                table(found)[clear], table(wanted)[clear], rtol=2e-5, atol=1e-9
            )


def test_a_group_is_as_good_as_its_best_or_its_best_two():
    """Group 0 has the best expert, group 1 the best two."""
    logits = torch.tensor([[3.0, -3.0, -3.0, -3.0, 2.0, 2.0, -3.0, -3.0]])
    firsts = {}
    for name in ("deepseek_v2", "deepseek_v3", "exaone_moe", "glm4_moe", "nemotron_h"):
        site = router_sites(tiny_model(FAMILIES[name]))[0]
        chosen = Selection(
            groups=site.selection.groups,
            kept_groups=site.selection.kept_groups,
            group_best=site.selection.group_best,
            gate="sigmoid",
        )
        router = nn.Module()
        router.top_k = 2
        firsts[name] = chosen(router, logits)[1][0, 0].item()
    assert firsts.pop("deepseek_v2") == 0
    assert set(firsts.values()) == {4}


def test_every_layer_is_drawn_from_a_stream_of_its_own():
    config = RouterConfig.from_dict({"kind": "l2r_sips", "rank": 2, "heads": 4})
    drawn = []
    for _ in range(2):
        model = swap_routers(tiny_model(FAMILIES["olmoe"]), config)
        drawn.append([site.router.anchors.detach() for site in router_sites(model)])
    first, second = drawn[0]
    assert not torch.isclose(first, second).any()
    assert torch.equal(first, drawn[1][0]) and torch.equal(second, drawn[1][1])  # and repeats
