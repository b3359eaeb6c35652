"""A swapped router chooses and weighs as the family's own does, whatever its logits are."""

import pytest
import torch
from torch import Tensor, nn

from l2r import LinearConfig, RouterConfig
from l2r.hf.swap import swap_routers
from l2r.hf.swap.families import FAMILIES
from l2r.hf.swap.sites import new_router, old_weight, router_sites
from l2r.routers.selection_rule import Selection
from tests.hf.families import TINY, sample_tokens, tiny_model
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


def settings_of(router: nn.Module) -> list[dict[str, object]]:
    """The router as it is, and with every setting that its family's rule may read changed."""
    scales = ("routed_scaling_factor", "route_scale", "router_scaling_factor")
    scaled = {name: 1.7 for name in scales if hasattr(router, name)}
    choices = {
        "norm_topk_prob": (True, False),
        "expert_selection_fn": ("softmax", "sigmoid"),
        "topk_method": ("greedy", "group_limited_greedy"),
    }
    there = {name: values for name, values in choices.items() if hasattr(router, name)}
    return [{}, scaled, *[{name: value} for name, values in there.items() for value in values]]


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
    for changed in settings_of(site.router):
        for key, value in changed.items():
            setattr(site.router, key, value)
        router = new_router(site, LinearConfig())
        with torch.no_grad():
            router.weight.copy_(weight)
        for x in inputs:
            found, wanted = table(router(x, *more)), table(site.router(x, *more))
            torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-9)


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
