"""Megatron's model with our plug is our OLMoE: logits, losses, weights, gradients."""

import pytest
import torch

from l2r.functional import load_balancing_loss, router_z_loss
from l2r.routers import capture
from tests.engines.engines import (
    ROUTERS,
    SIPS,
    assert_close,
    backward_in_float64,
    check_gradients,
    next_token_loss,
    periodic,
)

from .models import (
    BALANCE,
    EXPERTS,
    TOP_K,
    VOCABULARY,
    WIDTH,
    Z,
    configuration,
    forward,
    logged_losses,
    one_rank,
    small,
)

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # isort: skip
from megatron.core.process_groups_config import ProcessGroupCollection  # isort: skip
from megatron.core.transformer.module import Float16Module  # isort: skip
from megatron.core.transformer.identity_op import IdentityOp  # isort: skip
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler  # isort: skip

from l2r.engines.olmoe_tensors import OlmoeTensors  # isort: skip
from l2r.engines.megatron import L2RTopKRouter, plug  # isort: skip
from l2r.engines.megatron.checkpoint import _pairs, to_hugging_face  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")


@pytest.fixture(autouse=True, scope="module")
def _one_rank(tmp_path_factory):
    with one_rank(tmp_path_factory.mktemp("megatron")):
        yield


@pytest.mark.engine("megatron", "aux losses equal")
@pytest.mark.parametrize("kind", ROUTERS)
def test_model_equals_ours(kind):
    model = small({"kind": kind, **ROUTERS[kind]})
    ours = to_hugging_face(model).train()
    ids = periodic(4, 16, VOCABULARY)
    logged_losses()
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))
    routed = []
    for layer in model.decoder.layers:
        layer.mlp.router.register_forward_hook(lambda module, args, output: routed.append(output))
    theirs = forward(model, ids)
    next_token_loss(theirs, ids).backward()
    logged = logged_losses()

    with capture(ours) as captured:
        logits = ours(ids).logits
    balance = load_balancing_loss(captured.logits(), captured.indices(), variant="olmoe")
    z = router_z_loss(captured.logits())
    # Megatron adds a loss for every layer, ours are means over layers.
    layers = len(captured.logits())
    loss = next_token_loss(logits, ids)
    (loss + layers * (BALANCE * balance + Z * z)).backward()

    assert_close(theirs, logits, "logits")
    for (probs, chosen), own in zip(routed, captured.outputs.values(), strict=True):
        # Megatron's tokens are [S, B], ours [B, S].
        order = torch.arange(ids.numel()).view(ids.shape).T.flatten()
        spread = torch.zeros_like(probs).scatter(1, own[0].indices[order], own[0].weights[order])
        assert torch.equal(chosen, spread > 0)
        assert_close(probs, spread, "weights")
    largest = max(layer.abs().max().item() for layer in captured.logits())
    for name, value, scale in (
        ("load_balancing_loss", balance, 1.0),
        ("z_loss", z, max(1.0, largest) ** 2),  # a mixture's is 0: its logits are log p
    ):
        assert_close(logged[name].mean(), value, name, scale=scale)
    wide = backward_in_float64(ours, ids, layers * BALANCE, layers * Z)
    gradients = [{name: p.grad for name, p in m.named_parameters()} for m in (ours, wide, model)]
    mine, exact, theirs = (OlmoeTensors("", g) for g in gradients)
    check_gradients(
        _pairs(model, mine, theirs), _pairs(model, exact, OlmoeTensors("", gradients[2]))
    )


def test_the_engines_own_options_change_what_follows_the_logits():
    """Sigmoid scores, expert bias, groups, dropping and jitter come from Megatron's settings."""
    x = torch.randn(6, 2, WIDTH)
    plain = small(SIPS).decoder.layers[0].mlp.router
    probs, chosen = plain(x)
    for changes in (
        {"moe_router_score_function": "sigmoid"},
        {"moe_router_pre_softmax": False},
        {"moe_router_topk_scaling_factor": 2.0},
        {"moe_expert_capacity_factor": 0.5},
        {"moe_input_jitter_eps": 0.9},
    ):
        router = small(SIPS, **changes).decoder.layers[0].mlp.router
        router.l2r.load_state_dict(plain.l2r.state_dict())
        other, map_ = router(x)
        assert not (torch.equal(map_, chosen) and torch.allclose(other, probs)), changes
    balanced = small(SIPS, moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    router = balanced.decoder.layers[0].mlp.router
    router.expert_bias[3] = 10.0
    assert router(x)[1][:, 3].all() and router.local_tokens_per_expert.sum() == 12 * TOP_K


def test_recompute_gives_the_same_gradients():
    ids = periodic(4, 16, VOCABULARY)
    found = []
    for changes in (
        {},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ):
        model = small(SIPS, **changes)
        next_token_loss(forward(model, ids), ids).backward()
        found.append({n: p.grad for n, p in model.named_parameters()})
    for name, value in found[0].items():
        assert_close(found[1][name], value, name)


def test_a_bias_is_refused_and_so_is_a_spec_without_experts():
    with pytest.raises(ValueError, match="add_bias_linear must be False"):
        small(SIPS, add_bias_linear=True)
    dense, empty = get_gpt_layer_local_spec(), get_gpt_layer_local_spec()
    empty.submodules.mlp = IdentityOp
    for spec in (dense, empty):
        with pytest.raises(ValueError, match="no MoE layer"):
            plug(spec, SIPS)
    config = configuration()
    config.transformer_impl = "inference_optimized"
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with pytest.raises(ValueError, match="transformer_impl must be local or transformer_engine"):
        L2RTopKRouter(config, groups, router=SIPS)


def test_logits_have_the_dtype_that_megatron_asks_for():
    x = torch.randn(3, 2, WIDTH)
    for wanted, dtype in ((None, torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float64)):
        router = small(SIPS, moe_router_dtype=wanted).decoder.layers[0].mlp.router
        assert isinstance(router, L2RTopKRouter) and not hasattr(router, "weight")
        assert router.gating(x.bfloat16()).dtype == dtype
        assert router.gating(x.bfloat16()).shape == (3, 2, EXPERTS)


def test_the_rest_of_the_model_starts_as_with_megatrons_own_router():
    ours, stock = small(SIPS).state_dict(), small(None).state_dict()
    names = {name for name, value in stock.items() if isinstance(value, torch.Tensor)}
    shared = {name for name in names if ".router." not in name}
    assert shared < set(ours) and len(shared) > 20
    for name in shared:
        assert torch.equal(ours[name], stock[name]), name
    routers = [small(SIPS).decoder.layers[i].mlp.router.l2r.anchors for i in range(2)]
    assert not torch.equal(*routers)


def routers_of(model):
    return [m for m in model.modules() if isinstance(m, L2RTopKRouter)]


def test_the_seed_of_the_engine_gives_the_routers_on_cpu_and_meta():
    """Whatever was drawn before, and where: the seed and the number of the layer alone count."""
    first = [r.l2r.state_dict() for r in routers_of(small(SIPS))]
    with torch.device("meta"):
        empty = small(SIPS)
    assert all(p.is_meta for p in empty.parameters())
    empty.to_empty(device="cpu")
    for router, expected in zip(routers_of(empty), first, strict=True):
        router.reset_parameters()
        for name, value in router.l2r.state_dict().items():
            assert torch.equal(value, expected[name]), name
    other = small(SIPS, num_layers=3, seed=1)
    assert not torch.equal(other.decoder.layers[0].mlp.router.l2r.anchors, first[0]["anchors"])
    deeper = small(SIPS, num_layers=3)
    for router, expected in zip(routers_of(deeper), first, strict=False):
        assert torch.equal(router.l2r.anchors, expected["anchors"])


def test_router_parameters_stay_float32_where_megatron_stores_bf16():
    """Float16Module rounds all parameters; a router whose dtype is asked for keeps its own."""
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16}
    for wanted, dtype in ((None, torch.bfloat16), ("fp32", torch.float32), ("fp64", torch.float32)):
        model = small(SIPS, moe_router_dtype=wanted, **bf16)
        exact = [r.l2r.anchors.clone() for r in routers_of(model)]
        wrapped = Float16Module(model.config, model)
        kinds = {p.dtype for n, p in wrapped.named_parameters() if ".router." not in n}
        assert kinds == {torch.bfloat16}
        for router, value in zip(routers_of(wrapped), exact, strict=True):
            assert {p.dtype for p in router.l2r.parameters()} == {dtype}
            assert torch.equal(router.l2r.anchors, value)
            assert router.gating(torch.ones(2, 1, WIDTH).bfloat16()).isfinite().all()
    loss = next_token_loss(
        forward(wrapped, periodic(2, 16, VOCABULARY)), periodic(2, 16, VOCABULARY)
    )
    loss.backward()
    for router in routers_of(wrapped):
        assert router.l2r.anchors.grad.dtype == torch.float32
        assert router.l2r.anchors.grad.abs().max() > 0
    to_hugging_face(model)


def test_bf16_weights_of_a_router_change_experts_and_float32_ones_do_not():
    x = torch.randn(4096, 1, WIDTH).bfloat16()
    model = small(SIPS, moe_router_dtype="fp32", bf16=True, params_dtype=torch.bfloat16)
    router = model.decoder.layers[0].mlp.router
    _, exact = router(x)
    Float16Module(model.config, model)
    assert torch.equal(router(x)[1], exact)
    router.l2r.bfloat16()
    assert (router(x)[1] != exact).any(dim=1).float().mean() > 0.0005
