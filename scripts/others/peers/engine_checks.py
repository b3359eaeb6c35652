"""Our losses and selection rules against the engines' own functions, on the same logits."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from l2r import build_router
from l2r.functional import load_balancing_loss, router_z_loss
from l2r.routers.selection_rule import Selection

TOKENS, EXPERTS, TOP_K = 96, 16, 4


@pytest.fixture
def logits() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 2 * torch.randn(TOKENS, EXPERTS, generator=generator)


def dense(weights: Tensor, indices: Tensor) -> Tensor:
    """[T, N] with the weights of the chosen experts and zeros elsewhere, as Megatron has them."""
    return torch.zeros(TOKENS, EXPERTS).scatter(1, indices, weights)


def chosen(rule: Selection, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Weights and indices [T, K] that a selection of ours gives, with a bias [N] of the block."""
    router: Any = nn.Module()
    router.top_k = TOP_K
    return rule(router, logits, bias)


class TestMegatron:
    """Megatron-core's softmax and sigmoid routing, groups, bias, and both losses."""

    @pytest.mark.parametrize(
        ("rule", "options"),
        [
            (Selection(), {"use_pre_softmax": True}),
            (Selection(scale=2.5), {"use_pre_softmax": True, "scaling_factor": 2.5}),
            (Selection(normalize=True), {}),
            (
                Selection(gate="sigmoid", normalize=True, norm_eps=1e-20),
                {"score_function": "sigmoid"},
            ),
        ],
    )
    def test_selection(self, logits: Tensor, rule: Selection, options: dict[str, Any]) -> None:
        from megatron.core.transformer.moe import moe_utils

        probs, routing_map = moe_utils.topk_routing_with_score_function(logits, TOP_K, **options)
        weights, indices = chosen(rule, logits)
        assert torch.equal(dense(torch.ones_like(weights), indices).bool(), routing_map)
        torch.testing.assert_close(dense(weights, indices), probs)

    def test_groups_and_expert_bias(self, logits: Tensor) -> None:
        from megatron.core.transformer.moe import moe_utils

        bias = torch.linspace(-0.3, 0.3, EXPERTS)
        probs, _ = moe_utils.topk_routing_with_score_function(
            logits, TOP_K, score_function="sigmoid", expert_bias=bias, num_groups=4, group_topk=2
        )
        rule = Selection(
            gate="sigmoid",
            normalize=True,
            norm_eps=1e-20,
            groups=4,
            kept_groups=2,
            block_bias=True,
        )
        torch.testing.assert_close(dense(*chosen(rule, logits, bias)), probs)

    def test_losses(self, logits: Tensor) -> None:
        from megatron.core.transformer.moe import moe_utils

        _, indices = chosen(Selection(), logits)
        counts = torch.bincount(indices.flatten(), minlength=EXPERTS)
        balance = moe_utils.switch_load_balancing_loss_func(
            logits.softmax(1), counts, TOKENS, TOP_K, EXPERTS, 1.0
        )
        torch.testing.assert_close(load_balancing_loss(logits, indices, variant="olmoe"), balance)
        torch.testing.assert_close(router_z_loss(logits), moe_utils.z_loss_func(logits, 1.0))


class TestOlmoCore:
    """OLMo-core's linear router as a whole: weights, experts, counts and the sum of its losses."""

    @pytest.mark.parametrize("normalize", [False, True])
    def test_linear_router(self, normalize: bool) -> None:
        from olmo_core.nn.moe.router import MoELinearRouter

        torch.manual_seed(0)
        theirs = MoELinearRouter(
            d_model=32,
            num_experts=EXPERTS,
            top_k=TOP_K,
            normalize_expert_weights=1.0 if normalize else None,
            lb_loss_weight=0.01,
            z_loss_weight=0.001,
        )
        ours = build_router(
            "linear",
            hidden_size=32,
            num_experts=EXPERTS,
            top_k=TOP_K,
            normalize_weights=normalize,
        )
        with torch.no_grad():
            theirs.weight.normal_()
            own = ours.get_parameter("weight")
            own.copy_(theirs.weight.view_as(own))
        x = torch.randn(4, TOKENS // 4, 32)
        weights, indices, counts, loss = theirs(x)
        output = ours(x)
        assert torch.equal(output.indices.view_as(indices), indices)
        torch.testing.assert_close(output.weights.view_as(weights), weights)
        assert torch.equal(torch.bincount(output.indices.flatten(), minlength=EXPERTS), counts)
        balance = load_balancing_loss(output.logits, output.indices, variant="olmoe")
        torch.testing.assert_close(0.01 * balance + 0.001 * router_z_loss(output.logits), loss)


class TestTutel:
    """Tutel's load-balance loss, which counts first choices alone."""

    def test_gshard_loss(self, logits: Tensor) -> None:
        from tutel.impls.losses import gshard_loss

        scores = logits.softmax(1)
        indices = scores.topk(TOP_K, dim=1).indices
        torch.testing.assert_close(
            load_balancing_loss(logits, indices, variant="tutel"), gshard_loss(scores, indices.T)
        )
