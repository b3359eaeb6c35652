"""Certificates hold for the router as it runs: no rounding of its own dtype changes a decision."""

import sys

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from l2r.analysis.certificates import attack
from l2r.analysis.certificates import certify as certify_module
from l2r.analysis.certificates.arithmetic import family_of
from l2r.analysis.certificates.attack import decisions, exact, shortest_flip
from l2r.analysis.certificates.certify import certify, certify_first, holds_within
from l2r.functional.selection import first_choice
from l2r.hf.swap import router_sites
from l2r.routers import build_router
from tests.analysis.diagnostics.routers import inputs, make
from tests.hf.families import tiny_config
from tests.tiers import few

pytestmark = pytest.mark.usefixtures("coarse", "unchecked")

# Ways to logits and to a choice: a softmax ranks, logits do, with a bias, behind .float(), and the
# weight of a module inside of the router.
GATES = ("olmoe", "mixtral", "jamba", "gpt_oss", "granitemoe", "cohere2_moe", "hunyuan_v1_moe")
OURS = ("sips", "sips, no norm", "cosine", "dot", "sips, rank 4", "xmoe")
EDGES = ("linear", *OURS)
HALF = (torch.bfloat16, torch.float16)


def gate(family, dtype, *, common=0.0, spread=1.0, **sizes):
    """A family's own router, whose rows share a part that no choice depends on."""
    torch.manual_seed(0)
    config = tiny_config(family, **sizes)
    router = router_sites(AutoModelForCausalLM.from_config(config))[0].router
    for parameter in router.requires_grad_(False).parameters():
        parameter.copy_(spread * torch.randn_like(parameter))
        if parameter.dim() == 2:
            parameter.add_(common * torch.randn(1, parameter.shape[1]))
    return router.to(dtype).eval()


def tokens(dtype, count=40):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, tiny_config("olmoe").hidden_size, generator=generator).to(dtype)


def decided(router, x):
    """Mask [T, N] of the set that a router chooses as it runs, and its first expert [T]."""
    logits, weights, chosen = router(x)
    none = torch.zeros(logits.shape, dtype=torch.bool)
    return none.scatter(1, chosen, True), first_choice(weights, chosen)


def changed(router, x, radii, normals, *, tries=60):
    """Tokens [T] whose set, and whose first expert, some input inside its radius changes.

    Inputs on the sphere towards ``normals`` [T, C, D] and at random, rounded up or down at random,
    of which those count that are inside after the rounding.
    """
    generator = torch.Generator().manual_seed(2)
    wide, kept, first = x.double(), *decided(router, x)
    sets, firsts = torch.zeros(len(x), dtype=torch.bool), torch.zeros(len(x), dtype=torch.bool)
    for number in range(tries):
        way = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        if number % 2 and normals is not None:
            way = normals[:, (number // 2) % normals.shape[1]] + 0.02 * way
        unit = way / way.norm(dim=1, keepdim=True)
        share = torch.rand(len(x), 1, generator=generator, dtype=torch.float64) ** 0.1
        point = (wide + share * radii[:, None].clamp_max(1e4) * unit).to(x.dtype)
        inside = (point.double() - wide).norm(dim=1) <= radii
        new, new_first = decided(router, torch.where(inside[:, None], point, x))
        sets |= (new != kept).any(dim=1)
        firsts |= new_first != first
    return sets, firsts


def ways(router, x):
    """Directions [T, N, D] from the token's experts to every other: against the first and last."""
    weight = next(p for p in router.parameters() if p.dim() == 2).double()
    _, weights, chosen = router(x)
    order = chosen.gather(1, weights.argsort(dim=1, descending=True))
    ends = [weight[None] - weight[order[:, place]][:, None] for place in (0, -1)]
    return torch.cat(ends, dim=1) + 1e-30


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("family", GATES)
def test_no_input_inside_the_radius_changes_what_a_gate_in_half_precision_chooses(family, dtype):
    router, x = gate(family, dtype), tokens(dtype)
    radii, ideal = certify(router, x), certify(exact(router), x.double())
    assert (radii.topk > 0).any() and (radii.top1 > 0).any()
    assert (radii.topk <= ideal.topk).all() and (radii.top1 <= ideal.top1).all()
    normals = ways(router, x)
    assert not changed(router, x, radii.topk, normals)[0].any()
    assert not changed(router, x, radii.top1, normals)[1].any()
    assert torch.equal(certify_first(router, x), radii.top1)
    positive = radii.topk > 0
    assert holds_within(router, x, 0.999 * radii.topk)[positive].all()
    assert not holds_within(router, x, 1.001 * radii.topk).any()


@pytest.mark.parametrize("family", ["mixtral", "granitemoe"])
def test_radii_of_exact_arithmetic_would_not_hold_in_bf16(family):
    """So the tries would notice a rounding that is left out; the rows share a large part."""
    router, x = gate(family, torch.bfloat16, common=4.0, spread=0.1), tokens(torch.bfloat16)
    ideal, radii = certify(exact(router), x.double()), certify(router, x)
    normals = ways(router, x)
    assert changed(router, x, ideal.topk, normals)[0].sum() > 3
    assert changed(router, x, ideal.top1, normals)[1].sum() > 3
    assert not changed(router, x, radii.topk, normals)[0].any()
    assert not changed(router, x, radii.top1, normals)[1].any()


def test_the_rounding_of_a_gate_is_that_of_the_dtype_that_it_computes_in():
    """granitemoe returns float32 of a product in bf16; deepseek_v2 widens bf16 weights first."""
    x = tokens(torch.bfloat16)
    for family, sizes, unit in (
        ("granitemoe", {}, 2.0**-8),
        ("deepseek_v2", {"topk_method": "greedy"}, 2.0**-24),
    ):
        router = gate(family, torch.bfloat16, **sizes)
        assert router(x)[0].dtype == torch.float32 and router.weight.dtype == torch.bfloat16
        form, _ = certify_module._decisions(router, x)
        assert form.arithmetic.logits == unit and form.arithmetic.sums == 2.0**-24


def test_without_transformers_no_router_is_of_a_family(monkeypatch):
    router = nn.Linear(4, 2)
    router.__class__ = type("MixtralTopKRouter", (nn.Linear,), {})
    assert family_of(router).model_type == "mixtral"
    monkeypatch.setitem(sys.modules, "l2r.hf.swap", None)  # as where it cannot be imported
    assert family_of(router) is None


def test_logits_that_the_weight_does_not_give_have_no_certificate():
    """Softcapped ones, as of some families: in the product's order, not with its rounding."""
    router = gate("mixtral", torch.float32)
    forward = router.forward

    def capped(hidden_states):
        logits, *rest = forward(hidden_states)
        return logits.tanh(), *rest

    router.forward = capped
    with pytest.raises(
        ValueError, match="MixtralTopKRouter has other logits than its weight gives"
    ):
        certify(router, tokens(torch.float32))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("kind", ["l2r_sips", "xmoe", "linear_sips", "linear"])
def test_routers_of_ours_in_half_precision_have_no_certificate(kind, dtype):
    """Their queries are rounded, too."""
    sizes = {"hidden_size": 12, "num_experts": 6, "top_k": 2}
    router = build_router(kind, **sizes, dtype=str(dtype).removeprefix("torch.")).to(dtype)
    x = inputs(40).to(dtype)
    with pytest.raises(ValueError, match="which rounds its queries; no certificate is known"):
        certify(router, x)


def test_a_family_that_ranks_sigmoids_has_no_certificate():
    """Flint's are all 1 from 17.4 on; Cohere's are of the chosen, which logits rank."""
    x = tokens(torch.float32)
    with pytest.raises(ValueError, match="sigmoid scores, which round to ties"):
        certify(gate("flint", torch.float32), x)
    assert (certify(gate("cohere2_moe", torch.float32), x).topk > 0).any()


@pytest.mark.parametrize("kind", ["l2r_sips", "linear_sips"])
def test_a_size_of_the_query_at_which_phi_rounds_to_zero_is_never_reached(kind):
    """BatchNorm of |q| may make phi 0 in float32; all logits are equal then."""
    options = {"rank": 2, "heads": 1, "query_norm": "batchnorm"} if kind == "l2r_sips" else {}
    options |= {"query_norm": "batchnorm", "beta": 1.0}
    router = build_router(kind, hidden_size=2, num_experts=2, top_k=1, **options).eval()
    with torch.no_grad():
        router.anchors.copy_(torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]]))
        router.magnitude_norm.running_mean.fill_(1.0)
        router.magnitude_norm.running_var.fill_(0.01)
        if kind == "l2r_sips":
            router.projection.weight.copy_(torch.eye(2))
    x = torch.tensor([[-1.0, 0.0], [-0.6, 0.1]])
    radii = certify(router, x)
    assert not changed(router, x, radii.top1, -x[:, None].double())[1].any()


@pytest.mark.parametrize("kind", ["linear", "sips"])
def test_products_that_torch_may_round_have_no_certificate(kind):
    """TF32's, which the logits of our routers do not show."""
    router, x = make(kind).eval(), inputs(40)
    try:
        for precision in ("high", "medium"):
            torch.set_float32_matmul_precision(precision)
            with pytest.raises(ValueError, match=r"torch may multiply float32 in (tf32|bf16) here"):
                certify(router, x)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_probabilities_that_tie_where_logits_do_not_certify_nothing():
    """Softmax ranks: differences below its rounding, and experts below its smallest number."""
    x = tokens(torch.float32)
    close = gate("mixtral", torch.float32, spread=1e-9)
    logits = x.double() @ close.weight.double().T
    best = logits.topk(3).values
    assert (best.diff().abs() > 1e-13 * best[:, :2].abs()).all()  # no ties
    assert (certify(close, x).topk == 0).all() and (certify(close, x).top1 == 0).all()
    far = gate("mixtral", torch.float32, spread=60.0)
    weights = far(x)[1]
    assert ((weights == 0).any(dim=1)).any()  # a chosen one of weight 0: others have it, too
    radii = certify(far, x)
    assert (radii.topk[(weights == 0).any(dim=1)] == 0).all() and (radii.top1 > 0).any()
    assert not changed(far, x, radii.topk, ways(far, x))[0].any()


def test_no_radius_reaches_where_half_precision_overflows():
    router = gate("mixtral", torch.float16, spread=4000.0)
    x = tokens(torch.float16)
    radii = certify(router, x)
    assert torch.isfinite(router(x)[0]).all() or (radii.topk == 0).any()
    length = router.weight.double().norm(dim=1)
    room = (torch.finfo(torch.float16).max - (x.double() @ router.weight.double().T).abs()) / length
    assert (radii.topk <= room.amin(dim=1).clamp_min(0)).all()


@pytest.mark.parametrize("name", few(OURS, ("sips", "sips, rank 4", "xmoe"), "every form"))
def test_experts_that_only_rounding_tells_apart_are_not_certified(name):
    """Anchors of two experts that differ in their last bits, in a router of ours as it runs.

    In exact arithmetic one of them is ahead in whole regions; computed, either may be.
    """
    router, x = make(name, top_k=1), inputs(60)
    with torch.no_grad():
        router.anchors[1] = router.anchors[0] * (1 + 2e-7 * torch.randn_like(router.anchors[0]))
    radii, ideal = certify(router, x).topk, certify(exact(router), x.double()).topk
    kept, first = decided(router, x)
    close = kept[:, :2].any(dim=1)
    assert close.sum() > 3 and (radii[~close] > 0).all()
    assert not changed(router, x, radii, None)[0].any()
    same = first == decided(exact(router), x.double())[1]
    assert changed(router, x, torch.where(same, ideal, 0.0), None)[0].any()


def nearest_change(wide, x, inside):
    """Change [T, D] to the nearest boundary that a search finds, in exact arithmetic, and norm."""
    logits, slopes = attack._logit_slopes(wide, x)
    ties = attack._towards_ties(wide, x, *attack._nearest_pairs(logits, slopes, inside, 4), 15)
    return shortest_flip(wide, x, inside, 1.0001 * ties, torch.inf, halvings=45)


@pytest.mark.parametrize("name", few(EDGES, ("linear", "sips", "sips, rank 4"), "every form"))
def test_the_edge_of_a_ball_is_inside_of_what_rounding_leaves(name):
    """Tokens so near a boundary that the last bits of float32 are a part of their radius."""
    router, generator = make(name, top_k=1), torch.Generator().manual_seed(0)
    wide, x = exact(router), inputs(20).double()
    inside = decisions(wide, x, top1=True)
    near = (x + 0.995 * nearest_change(wide, x, inside)[0]).float()
    same = (decisions(wide, near.double(), top1=True) == inside).all(dim=1)
    near, inside = near[same], inside[same]
    change, size = nearest_change(wide, near.double(), inside)
    ideal, radii = certify(wide, near.double()).topk, certify(router, near).topk
    assert len(near) > 10 and (radii > 0).float().mean() > 0.8
    kept, broken = decided(router, near)[0], []
    for radius in (ideal, radii):
        flips = torch.zeros(len(near), dtype=torch.bool)
        for _ in range(100):
            share = 1 - 1e-6 * torch.rand(len(near), 1, generator=generator)
            last_bits = 3e-8 * torch.randn(near.shape, generator=generator)
            point = near.double() + (radius / size)[:, None] * share * change + last_bits
            within = (point.float().double() - near.double()).norm(dim=1) <= radius
            new, _ = decided(router, torch.where(within[:, None], point.float(), near))
            flips |= (new != kept).any(dim=1)
        broken.append(int(flips.sum()))
    assert broken[0] > 0 and broken[1] == 0
